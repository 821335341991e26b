"""One engine on the demo model for all tests of this folder; each test gets it idle and with a fresh probe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.generation import ProbedEngine, demo_tokenizer, wait_until
from mlx_lm.tokenizer_utils import TokenizerWrapper


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerWrapper:
    return demo_tokenizer()


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[ProbedEngine]:
    with ProbedEngine() as probed:
        yield probed


@pytest.fixture
def probed(shared_engine: ProbedEngine) -> Iterator[ProbedEngine]:
    shared_engine.probe.reset()
    yield shared_engine
    shared_engine.probe.reset()
    wait_until(lambda: (s := shared_engine.engine.status()).running == 0 and s.queued == 0, "the engine to be idle")
