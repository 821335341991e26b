"""The longer fuzzing run: `python tests/fuzz/run.py [--cases 100000] [--seed 1] [--atheris] [NAME ...]`.

Without --atheris, seeded damage of valid inputs, as in CI but with as many cases and whatever seed you like; it prints
cases, rate and findings for each parser. With --atheris (`pip install atheris`; one NAME) the damage is guided by
coverage of Titan's own code, and ends at the first finding. Inputs that were findings are written beside you, and can
be given to `--replay FILE NAME`. The figures of the last long run are in docs/security.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz.mutate import mutations

if TYPE_CHECKING:
    from fuzz.targets import Target

WATCHED = ["titan"]  # whose coverage guides atheris


def damage(target: Target, words: Sequence[bytes], seed: int, cases: int) -> int:
    """Run `cases` cases; the number of findings, of which the first ten are kept as files."""
    findings = 0
    start = time.monotonic()
    for data in mutations(target.corpus, words, seed, cases):
        try:
            target.run(data)
        except Exception as error:  # noqa: BLE001 - that is the question
            findings += 1
            if findings <= 10:
                path = Path(f"finding-{target.name.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}")
                path.write_bytes(data)
                print(f"{target.name}: {type(error).__name__}: {str(error)[:200]} ({path})")
    seconds = time.monotonic() - start
    print(f"{target.name:20} {cases:9,} cases {cases / seconds:8,.0f}/s {findings} findings", flush=True)
    return findings


def guided(atheris: ModuleType, target: Target, cases: int, seed: int) -> None:
    """Hand the parser to atheris; does not return."""
    corpus = Path(f"corpus-{target.name.replace(' ', '-')}")
    corpus.mkdir(exist_ok=True)
    for number, sample in enumerate(target.corpus):
        (corpus / f"seed-{number}").write_bytes(sample)
    atheris.Setup([sys.argv[0], f"-atheris_runs={cases}", f"-seed={seed}", str(corpus)], target.run)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parsers; all by default")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--atheris", action="store_true", help="guided by coverage; one parser")
    parser.add_argument("--replay", type=Path, help="run one input and let its error through")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    print(f"seed {options.seed}")
    atheris = importlib.import_module("atheris") if options.atheris else None
    with atheris.instrument_imports(include=WATCHED) if atheris else contextlib.nullcontext():
        parsers = importlib.import_module("fuzz.targets")
    with parsers.targets() as made:
        chosen = [made[name] for name in options.names or made]
        if options.replay is not None:
            chosen[0].run(options.replay.read_bytes())
            return 0
        if atheris is not None:
            guided(atheris, chosen[0], options.cases, options.seed)
        return int(any([damage(target, parsers.WORDS, options.seed, options.cases) for target in chosen]))


if __name__ == "__main__":
    sys.exit(main())
