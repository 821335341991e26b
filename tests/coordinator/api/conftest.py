"""One engine and one server for all tests of a module; each test finds them idle and the probe fresh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.api_server import RunningApi
from fixtures.generation import ProbedEngine, demo_tokenizer, wait_until
from fixtures.losing import LosingCluster
from mlx_lm.tokenizer_utils import TokenizerWrapper


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerWrapper:
    return demo_tokenizer()


@pytest.fixture(scope="session")
def session_engine() -> Iterator[ProbedEngine]:
    with ProbedEngine(prefill_step_tokens=16) as probed:
        yield probed


@pytest.fixture(scope="session")
def session_api(session_engine: ProbedEngine) -> Iterator[RunningApi]:
    with RunningApi(session_engine) as running:
        yield running


@pytest.fixture
def probed(session_engine: ProbedEngine) -> Iterator[ProbedEngine]:
    """The engine alone, for tests that start a server of their own."""
    session_engine.probe.reset()
    yield session_engine
    session_engine.probe.reset()
    wait_until(lambda: (s := session_engine.engine.status()).running == 0 and s.queued == 0, "an idle engine")


@pytest.fixture
def api(probed: ProbedEngine, session_api: RunningApi) -> RunningApi:
    assert session_api.probed is probed
    return session_api


@pytest.fixture(scope="module")
def losing() -> Iterator[LosingCluster]:
    """A cluster whose workers die and come back all the time, the same answers due."""
    with LosingCluster() as cluster:
        yield cluster
        remote, fallbacks = cluster.executed()
        assert remote > 0, "no worker was ever asked"
        assert fallbacks > 0, "no worker died on a request"
        assert cluster.lost > 1


@pytest.fixture(scope="module")
def losing_api(losing: LosingCluster) -> Iterator[RunningApi]:
    with RunningApi(losing) as running:
        yield running
