"""A worker with two addresses: both are measured, the faster is used, the other stands in, and is left again.

Run: .venv/bin/pytest tests/cluster/test_addresses.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from fixtures.plans import make_plan
from fixtures.proxy import HEALTHY, Fault, Proxy
from fixtures.reference import load_reference, reference_tokens, titan_tokens

from titan.coordinator.calibration import steps, timing
from titan.coordinator.cluster import ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.deploy import DEMO_MODEL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the loopback addresses 127.0.0.2 and 127.0.0.3")

FAST, SLOW = "127.0.0.2", "127.0.0.3"
PROMPT, TOKENS = [43, 459, 961, 344, 296, 411], 12
TIMEOUTS = {"execute": "2s", "connect": "1s", "readmit": "50ms", "readmit_max": "300ms"}
BACK_S = 30.0


@contextmanager
def two_addresses() -> Iterator[tuple[LoopbackCluster, Proxy, str, str]]:
    """A worker, a cable of it that can be pulled, and its addresses: the other one takes 3 ms more each way."""
    with LoopbackCluster(DEMO_MODEL, ("worker-1",), settings={"timeouts": TIMEOUTS}) as loopback, ExitStack() as stack:
        worker = loopback.workers[0]
        port = int(worker.address.rpartition(":")[2])
        lane = next(int(line["lane_port"]) for line in worker.log if line.get("message") == "listening")
        fast, slow = Proxy(FAST, (port, lane), seed=1), Proxy(SLOW, (port, lane), seed=2)
        stack.callback(fast.close)
        stack.callback(slow.close)
        slow.fault = Fault(delay_s=3e-3)
        yield loopback, fast, f"{FAST}:{port}", f"{SLOW}:{port}"


def give(loopback: LoopbackCluster, *addresses: str) -> None:
    behind = loopback.hosts.workers[0].model_copy(update={"addresses": addresses})
    loopback.hosts = loopback.hosts.model_copy(update={"workers": (behind,)})


def test_each_address_is_measured_and_the_faster_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 1)  # three milliseconds show without quiet
    monkeypatch.setattr(steps, "SAMPLES", 5)
    monkeypatch.setattr(steps, "BUDGET_S", 0.05)
    with two_addresses() as (loopback, _, fast, slow):
        give(loopback, slow, fast)
        cluster = loopback.coordinator(ClusterOptions())
        try:
            cluster.workers.greet()
            assert cluster.links[0].status.address == slow, "the first that hosts.yaml names is tried first"
            cluster.load_host()
            figures = cluster.measured_figures()
            assert figures.workers["worker-1"].address == fast
            (other,) = figures.elsewhere["worker-1"]
            assert other.address == slow
            assert other.round_trip_s > figures.workers["worker-1"].round_trip_s + 5e-3
            link = cluster.links[0]
            assert link.addresses == (fast, slow)
            assert link.status.address == fast
            (node,) = cluster.planner.problem(figures).nodes[1:]
            assert node.address == fast
            assert node.address_why is not None
            assert slow in node.address_why
        finally:
            cluster.close()


def test_the_other_address_stands_in_until_the_preferred_one_is_back() -> None:
    expected = reference_tokens(load_reference(DEMO_MODEL), PROMPT, TOKENS)
    with two_addresses() as (loopback, cable, fast, slow):
        give(loopback, fast, slow)
        plan = make_plan(loopback.checkpoint, ("coordinator", "worker-1"), lambda _layer, _expert: (1,))
        cluster = loopback.coordinator(ClusterOptions(plan=plan))
        try:
            loaded = cluster.load()
            link, dispatcher = cluster.links[0], cluster.dispatcher
            assert dispatcher is not None

            def serve_until(condition: Callable[[], bool], what: str) -> None:
                deadline = time.monotonic() + BACK_S
                while not condition():
                    assert titan_tokens(loaded, PROMPT, TOKENS) == expected
                    assert time.monotonic() < deadline, f"{what} did not happen within {BACK_S} s"

            assert link.status.address == fast
            cable.fault = Fault(refuse=True)
            cable.cut_all()
            serve_until(lambda: link.ready is not None and link.status.address == slow, "falling back")
            lost, epoch = link.times_set_aside, link.status.epoch
            failed = dispatcher.executed.fallbacks, dispatcher.executed.retried
            cable.fault = HEALTHY
            serve_until(lambda: link.ready is not None and link.status.address == fast, "returning")
            assert titan_tokens(loaded, PROMPT, TOKENS) == expected
            assert (dispatcher.executed.fallbacks, dispatcher.executed.retried) == failed, "a request was dropped"
            assert (link.times_set_aside, link.status.epoch) == (lost, epoch), "the session did not go along"
        finally:
            cluster.close()
