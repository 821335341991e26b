"""The one thread of a worker that owns MLX. Everything that touches an array runs here: jobs, and Execute requests.

Idle, it waits for the lanes' sockets itself. Admission is at the door: a bounded number of jobs and requests may wait,
and one whose requester has stopped waiting is dropped. Knows neither gRPC nor sessions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import mlx.core as mx

from titan.common.errors import EngineFailed, TitanError, WorkerDraining, WorkerOverloaded, WorkerTimeout
from titan.common.log import get_logger
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.worker.poller import IDLE_MS, Poller
from titan.worker.requests import MAX_QUEUED, Request, RequestQueue, expired

T = TypeVar("T")
Execute = Callable[[Sequence[ExecuteCall]], Sequence[ExecuteResult | TitanError]]


class Spare(Protocol):
    """Small pieces of work for when neither a job nor a request waits."""

    def __len__(self) -> int: ...

    def work(self) -> None:
        """Do one piece; never raises."""


log = get_logger("worker")

JOB_TIMEOUT_S = 120.0  # no job takes longer; beyond it the requester is told and the queue stays what it is
CACHE_LIMIT_BYTES = 256 << 20  # what MLX may keep of freed temporaries
LONG_S = 0.003  # a batch expected to take longer is worth waking the attendant for


@dataclass(slots=True)
class _Job:
    work: Callable[[], object]
    future: Future
    deadline: float | None


class MLXThread:
    """Runs jobs in order and requests in fair order, in turns, on a thread of its own.

    Args:
        merge: whether requests of one layer are executed together. None: on a CPU only, where it gives the same bits
            (the sorted kernels of Metal and CUDA depend on the number of pairs).
    """

    def __init__(self, name: str = "titan-mlx", *, merge: bool | None = None) -> None:
        self.requests = RequestQueue()
        self.poller = Poller()
        self._jobs: deque[_Job] = deque()
        self._merge = mx.default_device().type == mx.DeviceType.cpu if merge is None else merge
        self._execute: Execute | None = None
        self._spare: Spare | None = None
        self._pair_s = LONG_S  # running mean of seconds a pair; the first batches count as long
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        return len(self._jobs) + len(self.requests)

    def serve(self, execute: Execute, spare: Spare | None = None) -> None:
        """Who executes requests, on this thread: one outcome a call, in order; and what is done in between."""
        self._execute, self._spare = execute, spare

    def submit(self, work: Callable[[], T], *, deadline_s: float | None = None) -> Future[T]:
        """Queue a job; it is dropped with WorkerTimeout when it has not begun after `deadline_s`.

        Raises:
            WorkerOverloaded: too many jobs wait already.
            WorkerDraining: the thread is closing.
        """
        if self._closing:
            raise WorkerDraining("the worker is shutting down")
        if len(self._jobs) >= MAX_QUEUED:
            raise WorkerOverloaded(f"{MAX_QUEUED} jobs wait already", "send less at a time")
        future: Future[T] = Future()
        self._jobs.append(_Job(work, future, None if deadline_s is None else time.monotonic() + deadline_s))
        self.poller.wake()
        return future

    def run(self, work: Callable[[], T]) -> T:
        """Queue a job and wait for it."""
        return self.submit(work).result(JOB_TIMEOUT_S)

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued and end the thread; False when that took longer than `timeout_s`."""
        self._closing = True
        self.poller.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self.poller.close()
        return True

    def _loop(self) -> None:
        mx.set_cache_limit(CACHE_LIMIT_BYTES)
        while True:
            idle = not self._jobs and not self.requests and not self._spare
            if idle and self._closing:
                break
            self.poller.read(IDLE_MS if idle else 0)
            if self._jobs:
                job = self._jobs.popleft()
                with self.poller.attended():
                    self._run(job)
                del job
            batch = self.requests.take(merge=self._merge)
            if batch:
                try:
                    self._run_batch(batch)
                except Exception:  # a fault of ours in one batch: the thread must go on
                    log.error("a batch was lost", exc_info=True)
            elif self._spare and not self._jobs:
                self._spare.work()
            del batch
        for job in self._jobs:  # slipped in behind the end
            job.future.set_exception(WorkerDraining("the worker is shutting down"))
        for request in self.requests.drain():
            request.respond(WorkerDraining("the worker is shutting down"), 0)
        mx.clear_cache()
        mx.clear_streams()

    def _run(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        if job.deadline is not None and time.monotonic() > job.deadline:
            job.future.set_exception(WorkerTimeout("the request waited longer than its deadline"))
            return
        try:
            job.future.set_result(job.work())
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits; the thread must go on
            job.future.set_exception(error if isinstance(error, Exception) else EngineFailed(repr(error)))

    def _run_batch(self, batch: list[Request]) -> None:
        started = time.perf_counter()
        pairs = 0
        for request in batch:
            pairs += request.call.pair_rows.shape[0]
            if expired(request, started):
                self._refuse_expired(batch, started)
                return
        calls = [request.call for request in batch]
        if pairs * self._pair_s > LONG_S:
            with self.poller.attended():
                outcomes = self._outcomes(calls)
        else:
            outcomes = self._outcomes(calls)
        self._pair_s += 0.1 * ((time.perf_counter() - started) / pairs - self._pair_s)
        for request, outcome in zip(batch, outcomes, strict=True):
            request.respond(outcome, int((started - request.arrived) * 1e6))

    def _refuse_expired(self, batch: list[Request], now: float) -> None:
        """Answer those whose sender has stopped waiting, and run the others."""
        live = []
        for request in batch:
            if expired(request, now):
                late = WorkerTimeout("the request waited longer than its deadline")
                request.respond(late, int((now - request.arrived) * 1e6))
            else:
                live.append(request)
        if live:
            self._run_batch(live)

    def _outcomes(self, calls: Sequence[ExecuteCall]) -> Sequence[ExecuteResult | TitanError]:
        if self._execute is None:
            return [EngineFailed("nothing executes requests here yet")] * len(calls)
        try:
            return self._execute(calls)
        except (TitanError, ValueError, RuntimeError, MemoryError) as error:
            log.error("executing experts failed", exc_info=True)
            failed = (
                error if isinstance(error, TitanError) else EngineFailed(f"experts could not be executed ({error})")
            )
            return [failed] * len(calls)
