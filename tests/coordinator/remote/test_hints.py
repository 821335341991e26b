"""Hints over both transports: they bring experts in early, may be dropped, and can do no harm.

Run: .venv/bin/pytest tests/coordinator/remote/test_hints.py
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from fixtures.worker_server import DEADLINE_S, RunningWorker, wait_until

from titan.common.slots.table import SlotCounts
from titan.common.wire.messages import MAX_HINTED, ExecuteCall, ExecuteResult, Hint
from titan.coordinator.moe.workers import ReadyWorker
from titan.coordinator.remote.connection import Connection
from titan.coordinator.remote.exchange import Exchange, Outstanding
from titan.coordinator.remote.hints import HintSender
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.share import Cache, Share
from titan.coordinator.remote.transport import Transport
from titan.worker.hints import MAX_WAITING, Hints

HIDDEN, EXPERTS, SLOTS = 128, 8, 4
ALL = tuple(range(EXPERTS))
SERVED = Share({}, {0: Cache(SLOTS, ALL), 1: Cache(SLOTS, ALL)})
HELD = {layer: frozenset(ALL) for layer in (0, 1)}


@pytest.fixture
def connection(worker: RunningWorker) -> Iterator[Connection]:
    opened = worker.connect("instance-1", share=SERVED)
    yield opened
    opened.close()


@pytest.fixture(params=["lane", "grpc"])
def transport(request: pytest.FixtureRequest, worker: RunningWorker, connection: Connection) -> Iterator[Transport]:
    opened = worker.transport(connection, request.param)
    yield opened
    opened.close()


def counts(worker: RunningWorker, layer: int = 0) -> SlotCounts:
    holdings = worker.service.holdings
    assert holdings is not None
    return holdings._layers[layer].table.counts


def hints(worker: RunningWorker) -> Hints:
    return worker.service.execution.hints


def ask(transport: Transport, experts: Sequence[int], layer: int = 0) -> ExecuteResult:
    """One row through `experts`."""
    found: list[ExecuteResult] = []
    call = call_of(experts, layer)
    times = ReplyTimes(DEADLINE_S, 0.0)
    exchange = Exchange()
    exchange.send(transport, call, np.arange(len(experts)), times)

    def take(_: Outstanding, result: ExecuteResult) -> None:
        found.append(result._replace(outputs=result.outputs.copy()))

    failed = exchange.collect(take)
    assert not failed, failed[0].error
    return found[0]


def call_of(experts: Sequence[int], layer: int = 0) -> ExecuteCall:
    return ExecuteCall(
        request_id=7,
        layer=layer,
        activations=np.random.default_rng(3).standard_normal((1, HIDDEN), np.float32),
        pair_rows=np.zeros(len(experts), np.uint32),
        pair_experts=np.array(experts, np.uint32),
        sort=False,
        deadline_s=DEADLINE_S,
    )


def pinned_outputs(worker: RunningWorker, experts: Sequence[int], layer: int = 0) -> np.ndarray:
    """The same with everything in memory."""
    worker.connect("instance-1").close()
    holdings = worker.service.holdings
    assert holdings is not None
    outcome = worker.mlx.run(lambda: holdings.execute([call_of(experts, layer)]))[0]
    assert isinstance(outcome, ExecuteResult)
    return outcome.outputs.copy()


def arrived(worker: RunningWorker, layer: int = 0) -> bool:
    holdings = worker.service.holdings
    assert holdings is not None
    incoming = holdings._layers[layer].incoming
    assert incoming is not None
    if len(hints(worker)):
        return False
    worker.mlx.run(lambda: None)  # a hint that was taken has been followed
    return all(ticket.done.is_set() for ticket in list(incoming._tickets.values()))


def test_more_experts_than_slots_are_read_when_they_are_asked_for(worker: RunningWorker, transport: Transport) -> None:
    wanted = [5, 0, 3, 7, 1, 2, 6, 4]
    result = ask(transport, wanted)
    assert result.load_us > 0
    assert counts(worker).misses == EXPERTS
    np.testing.assert_array_equal(result.outputs, pinned_outputs(worker, wanted))


def test_a_hint_brings_experts_in_before_they_are_asked_for(worker: RunningWorker, transport: Transport) -> None:
    ask(transport, [0, 1, 2, 3])
    assert transport.hint(Hint(0, (5, 1, 6, 7), 2))
    wait_until(lambda: hints(worker).came == 1, "the hint's arrival")
    wait_until(lambda: arrived(worker), "reading ahead")
    before = counts(worker).misses
    result = ask(transport, [5, 1, 6])
    assert result.load_us == 0
    assert counts(worker).misses == before
    assert counts(worker).prefetched == counts(worker).useful == 2
    assert hints(worker).unused == 0
    np.testing.assert_array_equal(result.outputs, pinned_outputs(worker, [5, 1, 6]))


def test_a_hint_evicts_nothing_that_it_names(worker: RunningWorker, transport: Transport) -> None:
    ask(transport, [0, 1, 2, 3])
    assert transport.hint(Hint(0, (4, 5, 0, 1, 2, 3), 6))  # four slots, all of them named
    wait_until(lambda: hints(worker).unused == 1, "refusing the hint")
    assert ask(transport, [0, 1, 2, 3]).load_us == 0
    assert counts(worker).prefetched == 0


@pytest.mark.parametrize(
    "hint",
    [
        Hint(0, (EXPERTS,), 1),
        Hint(0, (1, 1), 1),
        Hint(0, (1, 2), 3),
        Hint(0, (1,), 0),
        Hint(0, (), 0),
        Hint(9, (1,), 1),
        Hint(0, tuple(range(MAX_HINTED)), 1),
    ],
)
def test_a_hint_that_is_none_does_no_harm(worker: RunningWorker, transport: Transport, hint: Hint) -> None:
    ask(transport, [0, 1])
    transport.hint(hint)
    assert transport.hint(Hint(1, (2,), 1))
    wait_until(lambda: hints(worker).came >= 1 and arrived(worker, 1), "the good hint")
    ask(transport, [0, 1])
    assert counts(worker).prefetched == 0
    ask(transport, [2], layer=1)
    assert counts(worker, 1).prefetched == 1


def test_a_hint_of_an_old_session_does_nothing(worker: RunningWorker, transport: Transport) -> None:
    ask(transport, [0, 1])
    fresh = worker.connect("instance-1", share=SERVED)
    transport.hint(Hint(0, (5,), 1))
    other = worker.transport(fresh, "lane")
    assert other.hint(Hint(1, (5,), 1))
    wait_until(lambda: hints(worker).came >= 1 and arrived(worker, 1), "the new session's hint")
    ask(other, [5], layer=1)
    ask(other, [5])
    assert counts(worker).prefetched == 0
    assert counts(worker, 1).prefetched == 1
    other.close()
    fresh.close()


def test_a_flood_is_bounded_and_what_is_overtaken_is_dropped(worker: RunningWorker, transport: Transport) -> None:
    ask(transport, [0, 1])
    release, started = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        assert release.wait(DEADLINE_S)

    job = worker.mlx.submit(hold)
    assert started.wait(DEADLINE_S)
    sent = sum(transport.hint(Hint(0, (5, 6), 2)) for _ in range(3 * MAX_WAITING))
    exchange = Exchange()
    call = call_of([0, 1])
    exchange.send(transport, call, np.arange(2), ReplyTimes(DEADLINE_S, 0.0))
    wait_until(lambda: len(worker.mlx.requests) == 1, "the request's arrival behind the hints")
    assert sent >= 1
    assert len(hints(worker)) <= 1
    release.set()
    job.result(DEADLINE_S)
    assert not exchange.collect(lambda _outstanding, _result: None)
    wait_until(lambda: not len(hints(worker)), "the hints' end")
    ask(transport, [0, 1])
    assert hints(worker).came <= sent
    if transport.name == "lane":  # in order: all of them came before the request that made them useless
        assert hints(worker).came == hints(worker).unused == sent == 3 * MAX_WAITING
        assert counts(worker).prefetched == 0


def test_a_closed_transport_drops_hints(transport: Transport) -> None:
    transport.close()
    assert not transport.hint(Hint(0, (1,), 1))


def test_useless_hints_are_only_sampled(worker: RunningWorker, transport: Transport) -> None:
    for step in range(60):
        transport.hint(Hint(0, (4 + step % 4,), 1))
        wait_until(lambda step=step: hints(worker).came == step + 1 and arrived(worker), "the hint")
        ask(transport, [0, 1, 2])
    assert 32 < counts(worker).prefetched < 40
    assert hints(worker).unused > 20


def test_hints_wait_in_a_bounded_place() -> None:
    waiting = Hints()
    for layer in range(MAX_WAITING + 10):
        waiting.put("a", Hint(layer, (1,), 1))
    waiting.put("b", Hint(50, (2,), 1))
    assert len(waiting) == MAX_WAITING
    waiting.put("a", Hint(50, (3,), 1))
    waiting.overtaken(50)
    taken = [hint.layer for hint in iter(waiting.take, None)]
    assert 50 not in taken
    assert taken == sorted(taken)
    assert waiting.came == MAX_WAITING + 12
    assert waiting.came - waiting.unused == len(taken)


class Told:
    """A transport that remembers what it was told."""

    def __init__(self) -> None:
        self.hints: list[Hint] = []

    def hint(self, hint: Hint) -> bool:
        self.hints.append(hint)
        return True


class Known:
    def __init__(self, ready: ReadyWorker | None, fetch_s: float | None) -> None:
        self.ready, self.fetch_s = ready, fetch_s


def test_each_worker_is_told_what_it_reads() -> None:
    times = ReplyTimes(1.0, 0.0)
    one, two = Told(), Told()
    first = ReadyWorker(one, {0: frozenset({9})}, times, {0: frozenset({1, 3, 5})})  # type: ignore[arg-type]
    second = ReadyWorker(two, {0: frozenset({8})}, times, {0: frozenset({2, 4})})  # type: ignore[arg-type]
    workers = [Known(first, 0.002), Known(second, None), Known(None, 5.0)]
    sender = HintSender(workers)
    assert sender.elsewhere(0) == {1, 2, 3, 4, 5, 8, 9}
    assert sender.elsewhere(1) == frozenset()
    assert sender.fetch_s(0) == 0.002
    assert sender.fetch_s(1) is None
    sender.hint(0, [5, 9, 1, 2, 3, 4], reads=3)
    assert one.hints == [Hint(0, [5, 1, 3], 2)]
    assert two.hints == []
    sender.hint(0, [2, 5], reads=2)
    assert two.hints == [Hint(0, [2], 1)]
    workers[0].ready = None
    assert sender.elsewhere(0) == {2, 4, 8}
    assert sender.sent == 3
