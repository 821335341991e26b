"""Every parser of outside input, on damaged inputs that are the same in every run: a result, or an error of ours.

24,000 seeded damages of valid inputs for each parser, and a few hundred of hypothesis' own making. For more, with new
seeds or guided by coverage, see run.py. Run: .venv/bin/pytest tests/fuzz
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from fuzz.mutate import mutations
from fuzz.targets import WORDS, Target, targets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# A damaged serial number may be negative; cryptography warns that it will refuse that one day, as we would.
pytestmark = pytest.mark.filterwarnings("ignore:Parsed a serial number:UserWarning")

CASES = 24_000
NAMES = (
    "hosts.yaml", "plan", "api key file", "one-time code", "certificate", "credentials", "revocation list",
    "signing request", "model shape", "enrolment message", "worker's calls",
)  # fmt: skip


@pytest.fixture(scope="module")
def parsers() -> Iterator[dict[str, Target]]:
    logging.disable(logging.CRITICAL)  # each refusal is a line in the worker's log
    try:
        with targets() as made:
            yield made
    finally:
        logging.disable(logging.NOTSET)


def test_all_are_tested(parsers: dict[str, Target]) -> None:
    assert set(parsers) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_inputs(parsers: dict[str, Target], name: str) -> None:
    target = parsers[name]
    for number, data in enumerate(mutations(target.corpus, WORDS, 20_260, CASES)):
        try:
            target.run(data)
        except Exception as error:  # noqa: BLE001 - that is the question
            pytest.fail(f"case {number}, {data[:200]!r}: {type(error).__name__}: {error}")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_arbitrary_inputs(parsers: dict[str, Target], name: str, data: bytes) -> None:
    parsers[name].run(data)


def test_what_is_valid_is_taken(parsers: dict[str, Target]) -> None:
    """Damage to inputs that are refused as they are would test nothing."""
    for target in parsers.values():
        for sample in target.corpus:
            target.run(sample)
