"""One layer's exchange with several workers: send to all, then collect with deadlines in one poll, each answer once.

A call that takes unusually long may be hedged: it is executed here as well, and what is ready first counts. Used by
the engine's thread alone. An answer nobody waits for any more is counted and dropped.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from titan.common.errors import ClusterError, WorkerLost, WorkerTimeout
from titan.common.units import format_seconds
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.traffic import Traffic
from titan.coordinator.remote.transport import Arrival, Transport

HEDGES_A_CALL = 0.05  # so many hedges are allowed for each answer, in the long run
MAX_HEDGE_CREDIT = 4.0
NEVER = float("inf")
MAX_BUSY_SHARE = 0.5  # of an answer's time: beyond it, and beyond MAX_BUSY_S, only an upper bound is known
MAX_BUSY_S = 0.001


class Outstanding(NamedTuple):
    """A call under way: `positions` are the places of its pairs in the layer's list of pairs."""

    transport: Transport
    call: ExecuteCall
    positions: np.ndarray
    times: ReplyTimes
    sent_at: float
    deadline: float
    hedge_at: float

    @property
    def worker(self) -> str:
        return self.transport.worker


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that brought nothing; its pairs are to be executed elsewhere unless they have been `hedged`."""

    outstanding: Outstanding
    error: ClusterError
    hedged: bool = False


OnResult = Callable[[Outstanding, ExecuteResult], None]
Answered = Callable[[], bool]
Hedge = Callable[[Outstanding, Answered], bool]
OnFailure = Callable[[Failed], None]


class Exchange:
    """Calls of one layer at a time. Ids of requests begin after `first_id`.

    Attributes:
        late: answers that nobody waited for.
        overdue: calls that were hedged and are still unanswered. Their workers get no new calls until they answer;
            at the deadline their sessions are lost, as with any other call.
        traffic: by worker.
        last_wire_s: how long the last answer was on the wire.
    """

    def __init__(self, first_id: int = 0) -> None:
        self.late = self.hedges = 0
        self.overdue: dict[int, Outstanding] = {}
        self.traffic: dict[str, Traffic] = {}
        self.last_wire_s = 0.0
        self._next_id = first_id
        self._waiting: dict[int, Outstanding] = {}
        self._failed: list[Failed] = []
        self._hedge_credit = 1.0
        self._poll = select.poll()
        self._transports: dict[int, Transport] = {}  # by descriptor, those that the poll knows
        self._on_result: OnResult = _drop
        self._looking_since = 0.0

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def send(
        self,
        transport: Transport,
        call: ExecuteCall,
        positions: np.ndarray,
        times: ReplyTimes,
        hedge_s: float | None = None,
    ) -> None:
        """Send a call; returns at once. A transport that has ended fails the call, which `collect` tells."""
        now = time.monotonic()
        hedge_at = NEVER if hedge_s is None else now + hedge_s
        outstanding = Outstanding(transport, call, positions, times, now, now + call.deadline_s, hedge_at)
        try:
            transport.send(call)
            self._watch(transport)
        except ClusterError as error:
            self._failed.append(Failed(outstanding, error))
        else:
            self._waiting[call.request_id] = outstanding

    def collect(
        self, on_result: OnResult, hedge: Hedge | None = None, on_failure: OnFailure | None = None
    ) -> list[Failed]:
        """Wait for every call sent since the last collect; returns those that failed.

        Waits no longer than the latest deadline. A transport that ends fails all its calls at once.

        Args:
            on_result: takes a result, whose outputs are valid during that call only. A ClusterError that it raises
                fails the call.
            hedge: executes an outstanding call here; looks at the function that it is given now and then and stops
                when the answer has come. True when it has finished, and its own result counts.
            on_failure: told of each failure at once; may send further calls, which are waited for as well.
        """
        self._on_result = on_result
        self._looking_since = time.monotonic()
        failed: list[Failed] = []
        while self._failed or self._waiting:
            fresh, self._failed = self._failed, []
            for failure in fresh:
                failed.append(failure)
                if on_failure is not None:
                    on_failure(failure)
            if self._waiting and not self._failed:
                self._look(hedge)
        self._on_result = _drop
        return failed

    def settle_overdue(self) -> list[Failed]:
        """Take in what hedged calls have brought by now; returns those that failed since, by deadline or otherwise."""
        self._serve(0)
        now = time.monotonic()
        for key in [key for key, o in self.overdue.items() if o.deadline <= now]:
            outstanding = self.overdue.pop(key)
            self._failed.append(Failed(outstanding, _timeout(outstanding), hedged=True))
        failed, self._failed = self._failed, []
        return failed

    def owes(self, transport: Transport) -> bool:
        """Whether a hedged call of this transport is unanswered."""
        return any(o.transport is transport for o in self.overdue.values())

    def abandon(self) -> None:
        """Forget what is under way (the forward pass is over); its replies will count as late."""
        self._waiting.clear()
        self._failed.clear()
        self._on_result = _drop

    # ----------------------------------------------------------------------------------------------------------------

    def _look(self, hedge: Hedge | None) -> None:
        """Wait for what comes first: an answer, a deadline, or the time to hedge."""
        waiting = self._waiting
        now = time.monotonic()
        if any(min(o.deadline, o.hedge_at) <= now for o in waiting.values()):
            # What has come counts, however late we look: this thread may have been reading experts meanwhile.
            self._serve(0)
        until = NEVER
        for key, outstanding in list(waiting.items()):
            if key not in waiting:
                continue  # its answer, or its transport's end, came while another call was hedged
            if outstanding.deadline <= now:
                self._failed.append(Failed(waiting.pop(key), _timeout(outstanding)))
                continue
            if outstanding.hedge_at <= now and hedge is not None and key in waiting:
                self._hedge(key, outstanding, hedge)
                until = 0.0  # time has passed: look at all of them again
                continue
            until = min(until, outstanding.deadline, outstanding.hedge_at)
        if waiting and not self._failed:
            self._serve(max(0.0, until - now) * 1000)

    def _watch(self, transport: Transport) -> None:
        fd = transport.fileno()
        if fd < 0:
            raise WorkerLost(f"the session with worker {transport.worker} was closed")
        if self._transports.get(fd) is not transport or transport.unsent:
            self._poll.register(fd, _interest(transport))
            self._transports[fd] = transport

    def _serve(self, timeout_ms: float) -> None:
        """Wait for sockets and take in what they bring."""
        for fd, event in self._poll.poll(timeout_ms):
            transport = self._transports[fd]
            try:
                if event & select.POLLOUT:
                    transport.flush()
                    self._poll.modify(fd, _interest(transport))
                if event & ~select.POLLOUT:
                    for arrival in transport.receive():
                        self._arrived(transport, arrival)
            except ClusterError as error:
                self._poll.unregister(fd)
                del self._transports[fd]
                self._fail_all(transport, error)

    def _arrived(self, transport: Transport, arrival: Arrival) -> None:
        outstanding = self._waiting.get(arrival.request_id)
        if outstanding is None or outstanding.transport is not transport:
            self.late += 1
            overdue = self.overdue.get(arrival.request_id)
            if overdue is not None and overdue.transport is transport:
                del self.overdue[arrival.request_id]
                overdue.times.record(overdue.positions.size, time.monotonic() - overdue.sent_at)
        else:
            try:
                result = transport.decode(arrival, outstanding.call)
                self._count(outstanding, result)
                self._on_result(outstanding, result)
            except ClusterError as error:
                self._failed.append(Failed(outstanding, error))
            del self._waiting[arrival.request_id]
            self._record(outstanding)
            if self._hedge_credit < MAX_HEDGE_CREDIT:
                self._hedge_credit += HEDGES_A_CALL
        transport.release(arrival)

    def _count(self, outstanding: Outstanding, result: ExecuteResult) -> None:
        traffic = self.traffic.get(outstanding.worker)
        if traffic is None:
            traffic = self.traffic[outstanding.worker] = Traffic()
        took_s = time.monotonic() - outstanding.sent_at
        self.last_wire_s = traffic.count(outstanding.call, result, took_s)

    def _record(self, outstanding: Outstanding) -> None:
        """Remember how long an answer took, unless it may have lain there while this thread was busy."""
        now = time.monotonic()
        busy_s = self._looking_since - outstanding.sent_at
        if busy_s <= MAX_BUSY_SHARE * (now - outstanding.sent_at) or busy_s <= MAX_BUSY_S:
            outstanding.times.record(outstanding.positions.size, now - outstanding.sent_at)

    def _hedge(self, key: int, outstanding: Outstanding, hedge: Hedge) -> None:
        if self._hedge_credit < 1:
            self._waiting[key] = outstanding._replace(hedge_at=NEVER)
            return
        self._hedge_credit -= 1
        self.hedges += 1

        def answered() -> bool:
            self._serve(0)
            return key not in self._waiting

        if hedge(outstanding, answered) and key in self._waiting:
            self.overdue[key] = self._waiting.pop(key)
        elif key in self._waiting:  # it gave up: wait on
            self._waiting[key] = outstanding._replace(hedge_at=NEVER)

    def _fail_all(self, transport: Transport, error: ClusterError) -> None:
        for calls in (self._waiting, self.overdue):
            for key in [key for key, o in calls.items() if o.transport is transport]:
                self._failed.append(Failed(calls.pop(key), error, hedged=calls is self.overdue))


def _drop(_outstanding: Outstanding, _result: ExecuteResult) -> None:
    """Nobody collects."""


def _interest(transport: Transport) -> int:
    return select.POLLIN | select.POLLOUT if transport.unsent else select.POLLIN


def _timeout(late: Outstanding) -> WorkerTimeout:
    return WorkerTimeout(
        f"worker {late.worker} did not answer for layer {late.call.layer} within "
        f"{format_seconds(late.deadline - late.sent_at)}",
        "its experts are read from the local disk until it answers again",
    )
