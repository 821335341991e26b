"""The threads that read: demand first, prefetch with what is left. Whoever waits for them waits with a deadline.

A prefetch never takes the last reader: at most width - 1 of them run at a time, and none begins while a demand waits.
A read that does not end is abandoned: its thread is replaced, and ends by itself when the disk answers after all.
Knows jobs, nothing of experts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import TypeVar

from titan.common.errors import DiskStalled, StoreError
from titan.common.platform import every_core

__all__ = ["READ_DEADLINE_S", "ReaderPool", "Ticket", "current_ticket"]

READ_DEADLINE_S = 30.0  # a sleeping external disk takes about 10 s to spin up, a drive that retries as long
MAX_WIDTH = 64
MAX_ABANDONED = 16  # threads that hang in a read and were replaced; beyond it the pool has fewer readers
_thread = threading.local()


T = TypeVar("T")


class State(Enum):
    """Of a job. ABANDONED: it runs, or hangs, and nobody waits for it any more."""

    QUEUED = auto()
    RUNNING = auto()
    CANCELLED = auto()
    ABANDONED = auto()


class Ticket:
    """One job's fate. `error` is set before `done`.

    `file` is what the job is reading now, for whoever has waited for it in vain.
    """

    __slots__ = ("_pool", "done", "error", "file", "job", "prefetch", "since_s", "state", "thread")

    def __init__(self, job: Callable[[], None], pool: ReaderPool, *, prefetch: bool) -> None:
        self.job = job
        self.prefetch = prefetch
        self.state = State.QUEUED
        self.since_s = time.monotonic()  # in this state
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.file: Path | None = None
        self.thread: threading.Thread | None = None
        self._pool = pool

    @property
    def abandoned(self) -> bool:
        return self.state is State.ABANDONED

    @property
    def writes(self) -> bool:
        """Whether the job may still write into its buffers."""
        return self.state in (State.RUNNING, State.ABANDONED) and not self.done.is_set()

    def cancel(self) -> bool:
        """Take a job that has not begun out of the queue; False when it has."""
        return self._pool.cancel(self)

    def run(self) -> None:
        _thread.ticket = self
        try:
            self.job()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self.error = error
        _thread.ticket = None
        self.done.set()

    def wait_done(self) -> None:
        """Raises DiskStalled when the job has not ended in time; it is abandoned then."""
        self._pool.wait_done([self])

    def wait(self) -> None:
        """Raises what the job raised, or DiskStalled as `wait_done`."""
        self._pool.finish([self])


def current_ticket() -> Ticket | None:
    """The job that this thread runs; None on a thread that is no reader."""
    return getattr(_thread, "ticket", None)


class ReaderPool:
    """`width` reader threads (w of the formulation), which start with the first job and end with `close`.

    Args:
        deadline_s: a read that takes longer is abandoned; so is one that waits for a reader while none gets done.
    """

    def __init__(self, width: int, deadline_s: float = READ_DEADLINE_S) -> None:
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"a pool of {width} readers, not 1..{MAX_WIDTH}")
        self.width = width
        self.deadline_s = deadline_s
        self._condition = threading.Condition()
        self._demand: deque[Ticket] = deque()
        self._prefetch: deque[Ticket] = deque()
        self._prefetching = 0
        self._abandoned = 0
        self._closed = False
        self._threads: set[threading.Thread] = set()
        self._ended_s = 0.0  # when the last job ended

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Have demand jobs run and wait for all of them; raises the first error, after every job has ended.

        Raises:
            DiskStalled: the disk does not answer. What has not begun is cancelled, the rest abandoned; the buffers of
                a ticket that `writes` must not be reused.
        """
        self.finish(self.begin(jobs))

    def begin(self, jobs: Sequence[Callable[[], None]]) -> list[Ticket]:
        """Hand demand jobs over; `finish` waits for them."""
        tickets = [Ticket(job, self, prefetch=False) for job in jobs]
        with self._condition:
            self._start()
            self._demand.extend(tickets)
            self._condition.notify(len(tickets))
        return tickets

    def finish(self, tickets: Sequence[Ticket]) -> None:
        """Wait for jobs; raises as `run_all`."""
        self.wait_done(tickets)
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error

    def wait_done(self, tickets: Sequence[Ticket]) -> None:
        """Wait until jobs have ended, well or not; raises DiskStalled as `run_all`."""
        try:
            for ticket in tickets:
                while not ticket.done.wait(self._time_left_s(ticket)):
                    if self._time_left_s(ticket) <= 0:
                        raise _stalled(ticket, self.deadline_s)
        except BaseException:
            self.abandon(tickets)
            raise

    def abandon(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for these jobs any more: cancel those that have not begun, replace the others' threads."""
        with self._condition:
            for ticket in tickets:
                if ticket.state is State.QUEUED:
                    self._remove(ticket)
                elif ticket.state is State.RUNNING and not ticket.done.is_set():
                    ticket.state = State.ABANDONED
                    self._replace(ticket)

    def prefetch(self, job: Callable[[], None]) -> Ticket:
        """Queue a job behind all demand."""
        ticket = Ticket(job, self, prefetch=True)
        with self._condition:
            self._start()
            self._prefetch.append(ticket)
            self._condition.notify()
        return ticket

    def call(self, read: Callable[[], T]) -> T:
        """What `read` returns, run behind all demand by one of at least two readers; raises as `run_all`."""
        found: list[T] = []
        self.finish([self.prefetch(lambda: found.append(read()))])
        return found[0]

    def cancel(self, ticket: Ticket) -> bool:
        with self._condition:
            if ticket.state is not State.QUEUED:
                return False
            self._remove(ticket)
            return True

    def close(self, timeout_s: float = 10.0) -> None:
        """End the threads after what they are reading; queued prefetches are dropped, abandoned reads left alone."""
        with self._condition:
            self._closed = True
            self._prefetch.clear()
            self._condition.notify_all()
            threads = list(self._threads)
        until_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _time_left_s(self, ticket: Ticket) -> float:
        since_s = ticket.since_s
        if ticket.state is State.QUEUED:  # the readers are busy: it is late when nothing gets done
            since_s = max(since_s, self._ended_s)
        return max(0.0, since_s + self.deadline_s - time.monotonic())

    def _remove(self, ticket: Ticket) -> None:
        (self._prefetch if ticket.prefetch else self._demand).remove(ticket)
        ticket.state = State.CANCELLED

    def _replace(self, ticket: Ticket) -> None:
        assert ticket.thread is not None, "a job that runs has a thread"
        self._threads.discard(ticket.thread)
        self._abandoned += 1
        if ticket.prefetch:
            self._prefetching -= 1
        if self._abandoned <= MAX_ABANDONED and not self._closed:
            self._add_threads(1)

    def _start(self) -> None:
        if self._closed:
            raise StoreError("the readers are closed", "Load the model again")
        if not self._threads and not self._abandoned:
            self._add_threads(self.width)

    def _add_threads(self, count: int) -> None:
        with every_core():
            for _ in range(count):
                thread = threading.Thread(target=self._loop, name="titan-reader", daemon=True)
                self._threads.add(thread)
                thread.start()

    def _loop(self) -> None:
        while (ticket := self._take()) is not None:
            ticket.run()
            with self._condition:
                self._ended_s = time.monotonic()
                if ticket.state is State.ABANDONED:
                    self._abandoned -= 1
                    if len(self._threads) >= self.width:  # somebody else reads in this thread's place
                        return
                    self._threads.add(threading.current_thread())
                elif ticket.prefetch:
                    self._prefetching -= 1
                    self._condition.notify()
            del ticket

    def _take(self) -> Ticket | None:
        with self._condition:
            while True:
                if self._demand:
                    return self._begun(self._demand.popleft())
                if self._closed:
                    return None
                if self._prefetch and self._prefetching < self.width - 1:
                    self._prefetching += 1
                    return self._begun(self._prefetch.popleft())
                self._condition.wait()

    def _begun(self, ticket: Ticket) -> Ticket:
        ticket.thread = threading.current_thread()
        ticket.since_s = time.monotonic()
        ticket.state = State.RUNNING
        return ticket


def _stalled(ticket: Ticket, deadline_s: float) -> DiskStalled:
    what = "" if ticket.file is None else f" of {ticket.file}"
    return DiskStalled(
        f"the disk has not answered a read{what} in {deadline_s:g} s",
        "Check the disk and its cable; it is used again as soon as it answers",
    )
