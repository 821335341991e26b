"""Requests that wait for the MLX thread: bounded, fair between coordinators, and taken together where that is the same.

Every (row, expert) pair is computed by itself, so requests for one layer can share a kernel. Thread-safe. Knows neither
transports nor experts.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Protocol

from titan.common.errors import TitanError, WorkerOverloaded
from titan.common.wire.messages import ExecuteCall, ExecuteResult

MAX_QUEUED = 64
MAX_QUEUED_PER_ORIGIN = 32
MAX_QUEUED_BYTES = 128 << 20
MAX_BATCH_PAIRS = 4096


class Request(Protocol):
    """A call that somebody waits for."""

    @property
    def call(self) -> ExecuteCall: ...

    @property
    def origin(self) -> Hashable:
        """The session it came from; sessions take turns."""
        ...

    @property
    def arrived(self) -> float:
        """time.perf_counter() when it was complete."""
        ...

    def respond(self, outcome: ExecuteResult | TitanError, queue_us: int) -> None:
        """Answer, once, saying how long the request waited. Returns at once and never raises."""
        ...


class RequestQueue:
    """Sessions take turns; within a session, first come first served."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[Request]] = OrderedDict()
        self._count = self._bytes = 0
        self._lock = threading.Lock()
        self.merged = 0  # requests that shared a kernel with another
        self.waited_s = 0.0  # all that were taken, together

    def __len__(self) -> int:
        return self._count

    def put(self, request: Request) -> None:
        """Queue a request.

        Raises:
            WorkerOverloaded: too many wait, in all or of this session.
        """
        nbytes = _nbytes(request)
        with self._lock:
            queue = self._waiting.get(request.origin)
            full = self._count >= MAX_QUEUED or self._bytes + nbytes > MAX_QUEUED_BYTES
            if full or (queue is not None and len(queue) >= MAX_QUEUED_PER_ORIGIN):
                raise WorkerOverloaded(f"{self._count} requests wait already", "send less at a time")
            if queue is None:
                self._waiting[request.origin] = queue = deque()
            queue.append(request)
            self._count += 1
            self._bytes += nbytes

    def take(self, *, merge: bool) -> list[Request]:
        """The request whose turn it is, and with `merge` those that can share its kernel; empty when nothing waits."""
        if not self._count:
            return []
        with self._lock:
            origin, queue = next(iter(self._waiting.items()))
            first = self._pop(origin, queue)
            if queue:
                self._waiting.move_to_end(origin)
            batch = [first]
            if merge and self._count:
                self._join(batch)
                self.merged += len(batch) if len(batch) > 1 else 0
            return batch

    def waiting(self, origin: Hashable) -> int:
        """How many requests of one session wait."""
        with self._lock:
            return len(self._waiting.get(origin, ()))

    def drain(self) -> list[Request]:
        """Everything that waits."""
        with self._lock:
            rest = [request for queue in self._waiting.values() for request in queue]
            self._waiting.clear()
            self._count = self._bytes = 0
            return rest

    def _join(self, batch: list[Request]) -> None:
        """Add the heads of the queues that are for the same layer and sort alike."""
        first = batch[0].call
        pairs = first.pair_rows.shape[0]
        for origin, queue in list(self._waiting.items()):
            while queue:
                call = queue[0].call
                pairs += call.pair_rows.shape[0]
                if call.layer != first.layer or call.sort != first.sort or pairs > MAX_BATCH_PAIRS:
                    break
                batch.append(self._pop(origin, queue))

    def _pop(self, origin: Hashable, queue: deque[Request]) -> Request:
        request = queue.popleft()
        self.waited_s += time.perf_counter() - request.arrived
        self._count -= 1
        self._bytes -= _nbytes(request)
        if not queue:
            del self._waiting[origin]
        return request


def expired(request: Request, now: float) -> bool:
    """Whether its sender has stopped waiting; `now` is time.perf_counter()."""
    return 0 < request.call.deadline_s < now - request.arrived


def arrival() -> float:
    return time.perf_counter()


def _nbytes(request: Request) -> int:
    """What a waiting request holds, and what its outputs will."""
    call = request.call
    return call.activations.nbytes + len(call.pair_rows) * (8 + call.activations.nbytes // call.activations.shape[0])
