"""Sessions over restarts: planned ones lose nothing, a new coordinator finds the experts, each transport serves.

Run: .venv/bin/pytest tests/cluster/test_sessions.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest
from fixtures.plans import all_remote, make_plan
from fixtures.proxy import Proxy
from fixtures.reference import load_reference, reference_tokens, titan_tokens

from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.deploy import DEMO_MODEL

NODES = ("coordinator", "worker-1", "worker-2")
PROMPT = [43, 459, 961, 344, 296, 411]
TOKENS = 24
FAST = {"timeouts": {"execute": "500ms", "readmit": "50ms", "readmit_max": "500ms"}}
BACK_S = 30.0


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return reference_tokens(load_reference(DEMO_MODEL), PROMPT, TOKENS)


@pytest.fixture(scope="module")
def loopback() -> Iterator[LoopbackCluster]:
    with LoopbackCluster(DEMO_MODEL, settings=FAST) as running:
        yield running


def coordinator(loopback: LoopbackCluster, transport: str = "auto") -> Cluster:
    loopback.hosts = loopback.hosts.model_copy(update={"transport": transport})
    return loopback.coordinator(ClusterOptions(plan=make_plan(loopback.checkpoint, NODES, all_remote)))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BACK_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {BACK_S} s"
        time.sleep(0.02)


@pytest.mark.parametrize("transport", ["lane", "grpc", "auto"])
def test_each_transport_gives_the_same_tokens(loopback: LoopbackCluster, expected: list[int], transport: str) -> None:
    cluster = coordinator(loopback, transport)
    try:
        loaded = cluster.load()
        used = {link.ready.transport.name for link in cluster.links if link.ready is not None}
        assert used <= ({"lane", "grpc"} if transport == "auto" else {transport})
        assert len(used) >= 1
        assert titan_tokens(loaded, PROMPT, TOKENS) == expected
        assert cluster.dispatcher is not None
        assert cluster.dispatcher.executed.fallbacks == 0
        assert cluster.dispatcher.executed.ssd == 0
        assert [link.breaker.state for link in cluster.links] == ["closed", "closed"]
    finally:
        cluster.close()


def test_a_new_coordinator_finds_the_experts_where_the_old_one_left_them(
    loopback: LoopbackCluster, expected: list[int]
) -> None:
    first = coordinator(loopback)
    first.load()
    first.close()
    second = coordinator(loopback)
    try:
        loaded = second.load()
        assert second.store.counts.experts == 0, "experts were read again"
        assert titan_tokens(loaded, PROMPT, TOKENS) == expected
    finally:
        second.close()


def test_workers_are_restarted_one_after_another_under_load(loopback: LoopbackCluster, expected: list[int]) -> None:
    cluster = coordinator(loopback, "lane")
    try:
        loaded = cluster.load()
        for number, link in enumerate(cluster.links):
            before = link.ready
            assert before is not None
            loopback.workers[number].process.terminate()
            wait_until(lambda: loopback.workers[number].process.poll() is not None or _runs(loaded, expected), "ending")  # noqa: B023
            loopback.restart(number)
            while link.ready is None or link.ready is before:
                assert titan_tokens(loaded, PROMPT, TOKENS) == expected
            assert titan_tokens(loaded, PROMPT, TOKENS) == expected
            assert link.breaker.state == "closed"
    finally:
        cluster.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the proxy needs the loopback address 127.0.0.2")
def test_a_worker_that_comes_and_goes_is_held_out_longer_each_time(
    expected: list[int],
) -> None:
    timeouts = {"execute": "500ms", "readmit": "300ms", "readmit_max": "10s"}
    with LoopbackCluster(DEMO_MODEL, ("worker-1",), settings={"timeouts": timeouts}) as loopback:
        worker = loopback.workers[0]
        port = int(worker.address.rpartition(":")[2])
        lane = next(int(line["lane_port"]) for line in worker.log if line.get("message") == "listening")
        behind = loopback.hosts.workers[0].model_copy(update={"addresses": (f"127.0.0.2:{port}",)})
        loopback.hosts = loopback.hosts.model_copy(update={"workers": (behind,)})
        plan = make_plan(loopback.checkpoint, ("coordinator", "worker-1"), lambda _layer, _expert: (1,))
        proxy = Proxy("127.0.0.2", (port, lane), seed=1)
        cluster = loopback.coordinator(ClusterOptions(plan=plan))
        try:
            loaded = cluster.load()
            link = cluster.links[0]
            failures = []
            for _ in range(3):
                wait_until(lambda: link.ready is not None and link.breaker.state == "closed", "taking it back")
                proxy.cut_all()
                assert titan_tokens(loaded, PROMPT, TOKENS) == expected
                wait_until(lambda: link.breaker.failures > len(failures), "counting the loss")
                failures.append(link.breaker.failures)
            assert failures == [1, 2, 3]  # and each doubles the pause: see test_breaker
        finally:
            cluster.close()
            proxy.close()


def _runs(loaded: object, expected: list[int]) -> bool:
    assert titan_tokens(loaded, PROMPT, TOKENS) == expected  # type: ignore[arg-type]
    return False
