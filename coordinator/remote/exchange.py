"""One layer's exchange with several workers: send to all, then collect with deadlines, each answer exactly once.

Used by the engine's thread alone. An answer nobody waits for any more is counted and dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from titan.common.errors import ClusterError, WorkerTimeout
from titan.common.units import format_seconds
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.coordinator.remote.transport import Inbox, Transport


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A call under way: `positions` are the places of its pairs in the layer's list of pairs."""

    worker: str
    transport: Transport
    call: ExecuteCall
    positions: np.ndarray
    sent_at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that brought nothing: its pairs are to be executed elsewhere."""

    outstanding: Outstanding
    error: ClusterError


class Exchange:
    """Calls of one layer at a time."""

    def __init__(self) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.late = 0
        self._next_id = 1
        self._outstanding: dict[int, Outstanding] = {}

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def send(self, worker: str, transport: Transport, call: ExecuteCall, positions: np.ndarray) -> None:
        now = time.monotonic()
        self._outstanding[call.request_id] = Outstanding(worker, transport, call, positions, now, now + call.deadline_s)
        transport.send(call)

    def collect(self, on_result: Callable[[Outstanding, ExecuteResult], None]) -> list[Failed]:
        """Wait for every call sent since the last collect; returns those that failed.

        Waits no longer than the latest deadline. A transport that ends fails all its calls at once.
        """
        failed: list[Failed] = []
        waiting = self._outstanding
        while waiting:
            deadline = min(o.deadline for o in waiting.values())
            try:
                arrival = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                now = time.monotonic()
                for key in [key for key, o in waiting.items() if o.deadline <= now]:
                    late = waiting.pop(key)
                    failed.append(Failed(late, _timeout(late)))
                continue
            if arrival.request_id is None:
                assert isinstance(arrival.payload, ClusterError)
                for key in [key for key, o in waiting.items() if o.transport is arrival.transport]:
                    failed.append(Failed(waiting.pop(key), arrival.payload))
                continue
            outstanding = waiting.get(arrival.request_id)
            if outstanding is None or outstanding.transport is not arrival.transport:
                self.late += 1
                continue
            del waiting[arrival.request_id]
            try:
                result = arrival.transport.decode(arrival, outstanding.call)
            except ClusterError as error:
                failed.append(Failed(outstanding, error))
            else:
                on_result(outstanding, result)
        return failed

    def abandon(self) -> None:
        """Forget what is under way (the forward pass is over); its replies will count as late."""
        self._outstanding.clear()


def _timeout(late: Outstanding) -> WorkerTimeout:
    return WorkerTimeout(
        f"worker {late.worker} did not answer for layer {late.call.layer} within "
        f"{format_seconds(late.deadline - late.sent_at)}",
        "its experts are read from the local disk until it answers again",
    )
