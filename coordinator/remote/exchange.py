"""One layer's exchange with several workers: send to all, then collect with deadlines in one poll, each answer once.

Used by the engine's thread alone. An answer nobody waits for any more is counted and dropped.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from titan.common.errors import ClusterError, WorkerLost, WorkerTimeout
from titan.common.units import format_seconds
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.coordinator.remote.transport import Arrival, Transport


@dataclass(frozen=True, slots=True, eq=False)
class Outstanding:
    """A call under way: `positions` are the places of its pairs in the layer's list of pairs."""

    transport: Transport
    call: ExecuteCall
    positions: np.ndarray
    sent_at: float
    deadline: float

    @property
    def worker(self) -> str:
        return self.transport.worker


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that brought nothing: its pairs are to be executed elsewhere."""

    outstanding: Outstanding
    error: ClusterError


OnResult = Callable[[Outstanding, ExecuteResult], None]


class Exchange:
    """Calls of one layer at a time. Ids of requests begin after `first_id`."""

    def __init__(self, first_id: int = 0) -> None:
        self.late = 0
        self._next_id = first_id
        self._outstanding: dict[int, Outstanding] = {}
        self._failed: list[Failed] = []

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def send(self, transport: Transport, call: ExecuteCall, positions: np.ndarray) -> None:
        """Send a call; returns at once. A transport that has ended fails the call, which `collect` tells."""
        now = time.monotonic()
        outstanding = Outstanding(transport, call, positions, now, now + call.deadline_s)
        try:
            transport.send(call)
        except ClusterError as error:
            self._failed.append(Failed(outstanding, error))
        else:
            self._outstanding[call.request_id] = outstanding

    def collect(self, on_result: OnResult) -> list[Failed]:
        """Wait for every call sent since the last collect; returns those that failed.

        Waits no longer than the latest deadline. A transport that ends fails all its calls at once. The outputs that
        `on_result` is given are valid during that call only.
        """
        failed, self._failed = self._failed, []
        waiting = self._outstanding
        poller, transports = select.poll(), {}
        for transport in {id(o.transport): o.transport for o in waiting.values()}.values():
            self._register(poller, transports, transport, failed)
        while waiting:
            now = time.monotonic()
            deadline = min(o.deadline for o in waiting.values())
            if deadline <= now:
                for key in [key for key, o in waiting.items() if o.deadline <= now]:
                    late = waiting.pop(key)
                    failed.append(Failed(late, _timeout(late)))
                continue
            for fd, event in poller.poll((deadline - now) * 1000):
                transport = transports[fd]
                try:
                    if event & select.POLLOUT:
                        transport.flush()
                        poller.modify(fd, _interest(transport))
                    if event & ~select.POLLOUT:
                        for arrival in transport.receive():
                            self._arrived(transport, arrival, on_result, failed)
                except ClusterError as error:
                    poller.unregister(fd)
                    self._fail_all(transport, error, failed)
        return failed

    def abandon(self) -> None:
        """Forget what is under way (the forward pass is over); its replies will count as late."""
        self._outstanding.clear()
        self._failed.clear()

    def _register(
        self, poller: select.poll, transports: dict[int, Transport], transport: Transport, failed: list[Failed]
    ) -> None:
        fd = transport.fileno()
        if fd < 0:
            self._fail_all(transport, WorkerLost(f"the session with worker {transport.worker} was closed"), failed)
            return
        poller.register(fd, _interest(transport))
        transports[fd] = transport

    def _arrived(self, transport: Transport, arrival: Arrival, on_result: OnResult, failed: list[Failed]) -> None:
        outstanding = self._outstanding.get(arrival.request_id)
        if outstanding is None or outstanding.transport is not transport:
            self.late += 1
        else:
            del self._outstanding[arrival.request_id]
            try:
                on_result(outstanding, transport.decode(arrival, outstanding.call))
            except ClusterError as error:
                failed.append(Failed(outstanding, error))
        transport.release(arrival)

    def _fail_all(self, transport: Transport, error: ClusterError, failed: list[Failed]) -> None:
        for key in [key for key, o in self._outstanding.items() if o.transport is transport]:
            failed.append(Failed(self._outstanding.pop(key), error))


def _interest(transport: Transport) -> int:
    return select.POLLIN | select.POLLOUT if transport.unsent else select.POLLIN


def _timeout(late: Outstanding) -> WorkerTimeout:
    return WorkerTimeout(
        f"worker {late.worker} did not answer for layer {late.call.layer} within "
        f"{format_seconds(late.deadline - late.sent_at)}",
        "its experts are read from the local disk until it answers again",
    )
