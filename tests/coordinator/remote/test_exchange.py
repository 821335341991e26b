"""Every pair of a layer is answered or given back exactly once, whatever arrives, late, twice or never.

Run: .venv/bin/pytest tests/coordinator/remote/test_exchange.py
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from titan.common.errors import ClusterError, WorkerLost, WorkerTimeout
from titan.common.wire.messages import ExecuteCall, ExecuteResult, Hint
from titan.coordinator.remote.exchange import MAX_HEDGE_CREDIT, Answered, Exchange, Failed, Outstanding
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.transport import Arrival

PAIRS = 4


class Scripted:
    """A transport over a socket pair; the test says what arrives."""

    name = "scripted"
    unsent = False
    outstanding = records = 0

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.leaving: ClusterError | None = None
        self.sent: list[ExecuteCall] = []
        self._in, self._out = socket.socketpair()
        self._arrivals: deque[Arrival] = deque()
        self._end: ClusterError | None = None

    def answer(self, request_id: int, value: float = 1.0) -> None:
        self._arrivals.append(Arrival(request_id, value))
        self._out.send(b"!")

    def end(self) -> None:
        self._end = WorkerLost(f"{self.worker} ended")
        self._out.send(b"!")

    def fileno(self) -> int:
        return self._in.fileno()

    def send(self, call: ExecuteCall) -> None:
        if self._end is not None:
            raise self._end
        self.sent.append(call)

    def hint(self, hint: Hint) -> bool:
        return False

    def flush(self) -> None: ...

    def receive(self) -> list[Arrival]:
        self._in.recv(100)
        arrivals = list(self._arrivals)
        self._arrivals.clear()
        if not arrivals and self._end is not None:
            raise self._end
        return arrivals

    def decode(self, arrival: Arrival, call: ExecuteCall) -> ExecuteResult:
        return ExecuteResult(call.request_id, np.full((PAIRS, 1), arrival.payload), 0, 0)

    def release(self, arrival: Arrival) -> None: ...

    def close(self) -> None:
        self._in.close()
        self._out.close()


@pytest.fixture
def workers() -> Iterator[tuple[Scripted, Scripted]]:
    pair = Scripted("a"), Scripted("b")
    yield pair
    for transport in pair:
        transport.close()


class Layer:
    """One layer's bookkeeping: who contributed which pair."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.sources: list[tuple[str, int]] = []

    def send(self, transport: Scripted, *, deadline_s: float = 5.0, hedge_s: float | None = None) -> int:
        request_id = self.exchange.next_id()
        none = np.zeros(PAIRS, np.uint32)
        call = ExecuteCall(request_id, 0, np.zeros((1, 1), np.float32), none, none, False, deadline_s)
        self.exchange.send(transport, call, np.arange(PAIRS) + PAIRS * request_id, ReplyTimes(5.0, 0.0), hedge_s)
        return request_id

    def take(self, outstanding: Outstanding, _result: ExecuteResult) -> None:
        self.sources.append(("remote", outstanding.call.request_id))

    def here(self, outstanding: Outstanding, answered: Answered) -> bool:
        if answered():
            return False
        self.sources.append(("hedge", outstanding.call.request_id))
        return True

    def collect(self) -> list[Failed]:
        failed = self.exchange.collect(self.take, self.here)
        self.sources += [("again", f.outstanding.call.request_id) for f in failed if not f.hedged]
        return failed


def test_answers_in_any_order(workers: tuple[Scripted, Scripted]) -> None:
    layer = Layer(Exchange())
    first, second = layer.send(workers[0]), layer.send(workers[1])
    workers[1].answer(second)
    workers[0].answer(first)
    assert not layer.collect()
    assert sorted(layer.sources) == [("remote", first), ("remote", second)]


def test_a_duplicate_and_a_strangers_answer_change_nothing(workers: tuple[Scripted, Scripted]) -> None:
    layer = Layer(Exchange())
    first, second = layer.send(workers[0]), layer.send(workers[1])
    workers[1].answer(first)  # not its request
    workers[0].answer(first)
    workers[0].answer(first)
    workers[0].answer(999)
    workers[1].answer(second)
    assert not layer.collect()
    assert sorted(layer.sources) == [("remote", first), ("remote", second)]


def test_an_answer_after_the_deadline_is_dropped_in_the_next_layer(workers: tuple[Scripted, Scripted]) -> None:
    layer = Layer(Exchange())
    first = layer.send(workers[0], deadline_s=0.02)
    failed = layer.collect()
    assert isinstance(failed[0].error, WorkerTimeout)
    workers[0].answer(first)
    second = layer.send(workers[0])
    workers[0].answer(second)
    assert not layer.collect()
    assert layer.sources == [("again", first), ("remote", second)]
    assert layer.exchange.late == 1


def test_a_transport_that_ends_fails_all_its_calls_and_no_others(workers: tuple[Scripted, Scripted]) -> None:
    layer = Layer(Exchange())
    first, second, other = layer.send(workers[0]), layer.send(workers[0]), layer.send(workers[1])
    workers[0].answer(first)
    workers[1].answer(other)
    workers[0].end()
    failed = layer.collect()
    assert [f.outstanding.call.request_id for f in failed] == [second]
    third = layer.send(workers[0])  # the sending itself fails now
    assert [f.outstanding.call.request_id for f in layer.collect()] == [third]


def test_nothing_is_waited_for_longer_than_the_deadline(workers: tuple[Scripted, Scripted]) -> None:
    layer = Layer(Exchange())
    layer.send(workers[0], deadline_s=0.05)
    layer.send(workers[1], deadline_s=0.01)
    started = time.monotonic()
    assert len(layer.collect()) == 2
    assert time.monotonic() - started < 5.0  # and not the five of nobody's deadline


def test_a_hedge_that_finishes_first_counts_and_the_answer_does_not(workers: tuple[Scripted, Scripted]) -> None:
    layer = Layer(Exchange())
    first = layer.send(workers[0], hedge_s=0.01)
    assert not layer.collect()
    assert layer.sources == [("hedge", first)]
    assert layer.exchange.owes(workers[0])
    assert not layer.exchange.owes(workers[1])
    workers[0].answer(first)
    assert not layer.exchange.settle_overdue()
    assert not layer.exchange.owes(workers[0])
    assert layer.sources == [("hedge", first)]


def test_an_answer_during_the_hedge_counts_and_the_hedge_does_not(workers: tuple[Scripted, Scripted]) -> None:
    layer = Layer(Exchange())
    first = layer.send(workers[0], hedge_s=0.01)

    def here(outstanding: Outstanding, answered: Answered) -> bool:
        assert not answered()
        workers[0].answer(first)
        return not answered()

    assert not layer.exchange.collect(layer.take, here)
    assert layer.sources == [("remote", first)]
    assert not layer.exchange.overdue


def test_a_hedged_call_that_is_never_answered_loses_the_session_without_a_second_execution(
    workers: tuple[Scripted, Scripted],
) -> None:
    layer = Layer(Exchange())
    first = layer.send(workers[0], deadline_s=0.05, hedge_s=0.01)
    assert not layer.collect()
    deadline = time.monotonic() + 5
    while not (lost := layer.exchange.settle_overdue()):
        assert time.monotonic() < deadline
    assert isinstance(lost[0].error, WorkerTimeout)
    assert lost[0].hedged
    assert layer.sources == [("hedge", first)]


def test_a_hedged_transport_that_ends_is_told_without_a_second_execution(workers: tuple[Scripted, Scripted]) -> None:
    layer = Layer(Exchange())
    first = layer.send(workers[0], hedge_s=0.01)
    assert not layer.collect()
    workers[0].end()
    lost = layer.exchange.settle_overdue()
    assert [f.hedged for f in lost] == [True]
    assert layer.sources == [("hedge", first)]


def test_hedges_are_rationed(workers: tuple[Scripted, Scripted]) -> None:
    layer = Layer(Exchange())
    for _ in range(int(MAX_HEDGE_CREDIT) + 3):
        layer.send(workers[0], deadline_s=0.03, hedge_s=0.001)
        layer.collect()
    assert layer.exchange.hedges == 1  # nothing was ever answered


def test_abandoned_calls_are_nobodys(workers: tuple[Scripted, Scripted]) -> None:
    layer = Layer(Exchange())
    first = layer.send(workers[0])
    layer.exchange.abandon()
    workers[0].answer(first)
    assert not layer.collect()
    assert not layer.sources
