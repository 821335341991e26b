"""The one thread of a worker that owns MLX. Everything that touches an array runs here, one job after another.

Admission is at the door: a bounded number of jobs may wait, and one whose requester has stopped waiting is dropped.
Knows neither gRPC nor sessions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import TypeVar

import mlx.core as mx

from titan.common.errors import EngineFailed, WorkerDraining, WorkerOverloaded, WorkerTimeout

T = TypeVar("T")

MAX_QUEUED = 64
JOB_TIMEOUT_S = 120.0  # no job takes longer; beyond it the requester is told and the queue stays what it is
CACHE_LIMIT_BYTES = 256 << 20  # what MLX may keep of freed temporaries


@dataclass(slots=True)
class _Job:
    work: Callable[[], object]
    future: Future
    queued_at: float
    deadline: float | None


class MLXThread:
    """Runs jobs in order on a thread of its own."""

    def __init__(self, name: str = "titan-mlx") -> None:
        self._jobs: Queue[_Job | None] = Queue(MAX_QUEUED)
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        return self._jobs.qsize()

    def submit(self, work: Callable[[], T], *, deadline_s: float | None = None) -> Future[T]:
        """Queue a job; it is dropped with WorkerTimeout when it has not begun after `deadline_s`.

        Raises:
            WorkerOverloaded: too many jobs wait already.
            WorkerDraining: the thread is closing.
        """
        if self._closing:
            raise WorkerDraining("the worker is shutting down")
        now = time.monotonic()
        future: Future[T] = Future()
        try:
            self._jobs.put_nowait(_Job(work, future, now, None if deadline_s is None else now + deadline_s))
        except Full:
            raise WorkerOverloaded(f"{MAX_QUEUED} requests wait already", "send less at a time") from None
        return future

    def run(self, work: Callable[[], T]) -> T:
        """Queue a job and wait for it."""
        return self.submit(work).result(JOB_TIMEOUT_S)

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued and end the thread; False when that took longer than `timeout_s`."""
        if self._closing:
            return not self._thread.is_alive()
        self._closing = True
        deadline = time.monotonic() + timeout_s
        try:
            self._jobs.put(None, timeout=timeout_s)
        except Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _loop(self) -> None:
        mx.set_cache_limit(CACHE_LIMIT_BYTES)
        while (job := self._jobs.get()) is not None:
            self._run(job)
            del job
        while True:  # a job that slipped in behind the end marker
            try:
                late = self._jobs.get_nowait()
            except Empty:
                break
            if late is not None:
                late.future.set_exception(WorkerDraining("the worker is shutting down"))
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
