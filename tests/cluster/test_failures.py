"""A worker dies, hangs, lies or comes back in the middle of an answer: the tokens stay mlx-lm's and nothing waits long.

Run: .venv/bin/pytest tests/cluster/test_failures.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.nn as nn
import pytest
from fixtures.plans import all_remote, make_plan
from fixtures.reference import load_reference, reference_tokens

from titan.coordinator.bench.alone import decode_alone
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.generation.model import LoadedModel
from titan.deploy import DEMO_MODEL

NODES = ("coordinator", "worker-1", "worker-2")
PROMPT = [43, 459, 961, 344, 296, 411, 270, 857, 327, 326]
TOKENS = 48
FAST = {"timeouts": {"execute": "300ms", "readmit": "100ms", "readmit_max": "500ms", "connect": "1s", "hello": "2s"}}
BACK_S = 20.0


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    return load_reference(DEMO_MODEL)


@pytest.fixture(scope="module")
def expected(reference: nn.Module) -> list[int]:
    return reference_tokens(reference, PROMPT, TOKENS)


@pytest.fixture
def duo() -> Iterator[tuple[LoopbackCluster, Cluster, LoadedModel]]:
    with LoopbackCluster(DEMO_MODEL, settings=FAST) as loopback:
        yield from _loaded(loopback)


def _loaded(loopback: LoopbackCluster) -> Iterator[tuple[LoopbackCluster, Cluster, LoadedModel]]:
    plan = make_plan(loopback.checkpoint, NODES, all_remote)
    cluster = loopback.coordinator(ClusterOptions(plan=plan))
    try:
        yield loopback, cluster, cluster.load()
    finally:
        cluster.close()


def generate(loaded: LoadedModel, at: dict[int, Callable[[], object]] | None = None) -> list[int]:
    """Greedy tokens; `at[n]` is called when n tokens are out."""
    events = at or {}
    tokens: list[int] = []
    for step in decode_alone(loaded.model, loaded.make_cache(), PROMPT, TOKENS):
        tokens.append(step.token)
        if len(tokens) in events:
            events[len(tokens)]()
    return tokens


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = BACK_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)


def test_killed_worker(
    duo: tuple[LoopbackCluster, Cluster, LoadedModel], expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    loopback, cluster, loaded = duo
    assert generate(loaded, {10: loopback.workers[0].kill}) == expected
    assert cluster.links[0].ready is None
    assert cluster.links[0].status.state in ("away", "connecting")
    assert cluster.dispatcher is not None
    assert cluster.dispatcher.executed.ssd > 0
    assert any("worker-1" in r.getMessage() for r in caplog.records if r.levelname == "WARNING")

    first_epoch = 1
    loopback.restart(0)
    wait_until(lambda: cluster.links[0].ready is not None, "taking worker-1 back")
    before = cluster.dispatcher.executed.remote["worker-1"]
    assert generate(loaded) == expected
    assert cluster.dispatcher.executed.remote["worker-1"] > before
    assert cluster.links[0].status.epoch >= first_epoch


def test_stopped_worker_is_replaced_within_its_deadline_and_taken_back(
    duo: tuple[LoopbackCluster, Cluster, LoadedModel], expected: list[int]
) -> None:
    loopback, cluster, loaded = duo
    worker = loopback.workers[1]
    session_before = cluster.links[1].status.epoch
    assert generate(loaded, {7: worker.pause}) == expected
    assert cluster.dispatcher is not None
    assert cluster.dispatcher.executed.fallbacks + cluster.dispatcher.executed.hedged > 0
    assert cluster.links[1].ready is None
    worker.resume()
    wait_until(lambda: cluster.links[1].ready is not None, "taking worker-2 back")
    assert cluster.links[1].status.epoch > session_before, "it came back as the same session"
    assert generate(loaded) == expected


def test_both_workers_gone(duo: tuple[LoopbackCluster, Cluster, LoadedModel], expected: list[int]) -> None:
    loopback, _, loaded = duo
    assert generate(loaded, {5: loopback.workers[0].kill, 12: loopback.workers[1].kill}) == expected


def test_terminated_worker_drains(duo: tuple[LoopbackCluster, Cluster, LoadedModel], expected: list[int]) -> None:
    loopback, _, loaded = duo
    worker = loopback.workers[0]
    assert generate(loaded, {9: worker.process.terminate}) == expected
    assert worker.stop() == 0
    assert any(line.get("message") == "stopped" for line in worker.log)


@pytest.mark.parametrize("mode", ["nan", "short", "swapped"])
def test_worker_that_answers_garbage(mode: str, expected: list[int], caplog: pytest.LogCaptureFixture) -> None:
    bad = str(Path(__file__).parents[1] / "fixtures" / "bad_worker.py")
    with LoopbackCluster(DEMO_MODEL, settings=FAST, program=(sys.executable, bad, mode, "40")) as loopback:
        for _, cluster, loaded in _loaded(loopback):
            assert generate(loaded) == expected
            assert cluster.dispatcher is not None
            assert cluster.dispatcher.executed.fallbacks > 0
            assert any("set aside" in r.getMessage() for r in caplog.records)


def test_worker_that_computes_wrongly_is_found_by_spot_checks(
    expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    bad = str(Path(__file__).parents[1] / "fixtures" / "bad_worker.py")
    settings = FAST | {"verify": "100%"}
    with LoopbackCluster(DEMO_MODEL, settings=settings, program=(sys.executable, bad, "wrong", "40")) as loopback:
        for _, cluster, loaded in _loaded(loopback):
            assert generate(loaded) == expected
            assert cluster.dispatcher is not None
            assert cluster.dispatcher.executed.verified > 0
            assert cluster.dispatcher.executed.fallbacks > 0
            assert any("computed something else" in r.getMessage() for r in caplog.records)


def test_spot_checks_of_honest_workers_find_nothing(expected: list[int]) -> None:
    settings = {"timeouts": {"execute": "4s"}, "verify": 0.5}
    with LoopbackCluster(DEMO_MODEL, settings=settings) as loopback:
        for _, cluster, loaded in _loaded(loopback):
            assert generate(loaded) == expected
            assert cluster.dispatcher is not None
            assert cluster.dispatcher.executed.verified > 10
            assert cluster.dispatcher.executed.fallbacks == 0


def test_a_replica_takes_over_what_a_killed_worker_was_asked(expected: list[int]) -> None:
    with LoopbackCluster(
        DEMO_MODEL, settings=FAST | {"timeouts": {"execute": "10s"}}, worker_bytes=1 << 30
    ) as loopback:
        plan = make_plan(loopback.checkpoint, NODES, lambda _layer, _expert: (1, 2))
        cluster = loopback.coordinator(ClusterOptions(plan=plan))
        try:
            loaded = cluster.load()
            assert generate(loaded, {10: loopback.workers[0].kill}) == expected
            assert cluster.dispatcher is not None
            done = cluster.dispatcher.executed
            assert done.remote["worker-1"] > 0
            assert done.remote["worker-2"] >= done.retried > 0
            assert done.fallbacks == done.ssd == 0
        finally:
            cluster.close()
