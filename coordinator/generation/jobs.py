"""Requests that wait and requests that run, between those who send them and the engine's thread. Knows no model."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from titan.common.errors import QueueFull, TitanError
from titan.coordinator.generation.events import Finished, Timings, Usage
from titan.coordinator.generation.handle import Job
from titan.coordinator.generation.observer import Observer
from titan.coordinator.generation.request import GenerationRequest

__all__ = ["JobCounts", "Jobs"]

_RETRY_AFTER_BOUNDS_S = (1.0, 60.0)


@dataclass(frozen=True, slots=True)
class JobCounts:
    """Requests now, and those that ended since the start."""

    queued: int
    running: int
    cancelling: int
    completed: int
    failed: int
    cancelled: int


class Jobs:
    """From any thread.

    Args:
        queue_limit: requests that may wait.
        observer: told of requests that are cancelled before they ran.

    Attributes:
        changed: notified whenever the engine's thread may have something to do.
    """

    def __init__(self, queue_limit: int, observer: Observer) -> None:
        self.changed = threading.Condition()
        self._queue_limit = queue_limit
        self._observer = observer
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._refused: TitanError | None = None
        self._ended = {"completed": 0, "failed": 0, "cancelled": 0}
        self._typical_s = 1.0

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def counts(self) -> JobCounts:
        with self.changed:
            cancelling = sum(job.cancelled for job in self._running)
            return JobCounts(len(self._waiting), len(self._running), cancelling, **self._ended)

    def put(self, jobs: list[Job]) -> None:
        """Queue all of them or none.

        Raises:
            QueueFull: too many wait already.
            TitanError: what `refuse` was given.
        """
        with self.changed:
            if self._refused is not None:
                raise self._refused
            if len(self._waiting) + len(jobs) > self._queue_limit:
                raise QueueFull(
                    f"{len(self._waiting)} requests wait already and the queue holds {self._queue_limit}",
                    "try again later",
                )
            self._waiting.extend(jobs)
            self.changed.notify_all()

    def take(self, fits: Callable[[GenerationRequest], bool]) -> Job | None:
        """The next request in line, which runs from now on, if there is room for it."""
        with self.changed:
            if not self._waiting or not fits(self._waiting[0].request):
                return None
            job = self._waiting.popleft()
            self._running.append(job)
            return job

    def end(self, job: Job, outcome: Finished | TitanError) -> None:
        """A request that ran is over; what comes after its first end is ignored."""
        with self.changed:
            if job not in self._running:
                return
            self._running.remove(job)
            self._typical_s += 0.3 * (time.monotonic() - job.submitted_s - self._typical_s)
            if isinstance(outcome, Finished):
                self._ended["cancelled" if outcome.reason == "cancelled" else "completed"] += 1
            else:
                self._ended["failed"] += 1
        job.deliver(outcome)

    def cancel(self, job: Job) -> None:
        """End a request within a step; at once if it waits."""
        job.mark_cancelled()
        with self.changed:
            if job not in self._waiting:
                return  # it runs, and the loop looks at the mark, or it is over
            self._waiting.remove(job)
            self._ended["cancelled"] += 1
        usage, timings = Usage(len(job.request.prompt), 0), Timings(queue_s=time.monotonic() - job.submitted_s)
        self._observer.finished("cancelled", usage, timings)
        job.deliver(Finished("cancelled", usage, timings))

    def end_running(self, error: TitanError) -> None:
        """All that run have failed."""
        with self.changed:
            running = list(self._running)
        for job in running:
            self.end(job, error)

    def abandon_running(self, error: TitanError) -> list[str]:
        """The clients of all that run get an error now; the places are freed when `end` is called after all."""
        with self.changed:
            running = list(self._running)
        for job in running:
            job.mark_cancelled()
            job.deliver(error)
        return [job.request.request_id for job in running]

    def refuse(self, error: TitanError) -> None:
        """Take nothing more: those that wait and those to come get the error, those that run are cancelled."""
        with self.changed:
            self._refused = error
            waiting = list(self._waiting)
            self._waiting.clear()
            for job in self._running:
                job.mark_cancelled()
            self.changed.notify_all()
        for job in waiting:
            job.deliver(error)

    def retry_after_s(self, at_once: int) -> float:
        """A guess of when the queue will have moved, where so many requests run at once."""
        low, high = _RETRY_AFTER_BOUNDS_S
        with self.changed:
            rounds = 1 + len(self._waiting) / at_once
            return min(max(self._typical_s * rounds / 2, low), high)
