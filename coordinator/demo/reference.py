"""What mlx-lm itself answers, in a process of its own: `python -m titan.coordinator.demo.reference` reads a JSON object
`{"model", "defaults", "prompt", "max_tokens"}` from standard input and writes the greedy tokens as a JSON list.

Uses nothing of Titan but the dtype rule: the comparison must not share code with what it checks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from titan.common.errors import EngineFailed

TIMEOUT_S = 600.0


def reference_tokens(
    model: Path, prompt: list[int], max_tokens: int, defaults: Mapping[str, object] | None = None
) -> list[int]:
    """Greedy tokens of mlx-lm's generate_step on the same checkpoint, up to the end-of-text token.

    Args:
        defaults: the family's values for keys that config.json leaves out (`Checkpoint.config_defaults`).
    """
    child = subprocess.run(
        [sys.executable, "-m", "titan.coordinator.demo.reference"],
        input=json.dumps(
            {"model": str(model), "defaults": dict(defaults or {}), "prompt": prompt, "max_tokens": max_tokens}
        ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if child.returncode != 0:
        raise EngineFailed(f"mlx-lm did not answer (status {child.returncode}: {child.stderr[-300:]})")
    return json.loads(child.stdout.splitlines()[-1])


def _main() -> None:
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model, load_tokenizer

    request = json.load(sys.stdin)
    model, _ = load_model(Path(request["model"]), lazy=True, model_config=request["defaults"])
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32)
    ends = load_tokenizer(Path(request["model"])).eos_token_ids
    tokens: list[int] = []
    for token, _ in generate_step(mx.array(request["prompt"]), model, max_tokens=request["max_tokens"]):
        if int(token) in ends:
            break
        tokens.append(int(token))
    sys.stdout.write(json.dumps(tokens) + "\n")


if __name__ == "__main__":
    _main()
