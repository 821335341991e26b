"""The threads that read: demand first, prefetch with what is left, and the thread that waits helps.

A prefetch never takes the last reader: at most width - 1 of them run at a time, and none begins while a demand waits.
Knows jobs, nothing of experts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from titan.common.errors import DiskStalled, StoreError
from titan.common.platform import every_core

__all__ = ["ReaderPool", "Ticket"]

WAIT_TIMEOUT_S = 120.0  # no read takes longer on a disk that works
MAX_WIDTH = 64


class Ticket:
    """One job's fate. `error` is set before `done`."""

    __slots__ = ("_pool", "done", "error", "job", "prefetch", "state")

    def __init__(self, job: Callable[[], None], pool: ReaderPool, *, prefetch: bool) -> None:
        self.job = job
        self.prefetch = prefetch
        self.state = "queued"
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._pool = pool

    def cancel(self) -> bool:
        """Take a job that has not begun out of the queue; False when it has."""
        return self._pool.cancel(self)

    def run(self) -> None:
        try:
            self.job()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self.error = error
        self.done.set()

    def wait_done(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Raises DiskStalled when the job has not ended in time."""
        if not self.done.wait(timeout_s):
            raise DiskStalled(f"the disk has not answered a read in {timeout_s:.0f} s", "Check the disk")

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Raises what the job raised, or DiskStalled when it has not ended in time."""
        self.wait_done(timeout_s)
        if self.error is not None:
            raise self.error


class ReaderPool:
    """`width` reader threads (w of the formulation).

    The thread that waits for demand reads is a reader too: it takes its own jobs that nobody has begun. Threads start
    with the first job and end with `close`.
    """

    def __init__(self, width: int) -> None:
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"a pool of {width} readers, not 1..{MAX_WIDTH}")
        self.width = width
        self._condition = threading.Condition()
        self._demand: deque[Ticket] = deque()
        self._prefetch: deque[Ticket] = deque()
        self._prefetching = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run demand jobs and wait for all of them; raises the first error, after every job has ended.

        Raises:
            DiskStalled: the disk does not answer. The buffers of those jobs may still be written: do not reuse them.
        """
        if len(jobs) == 1 or self.width == 1:
            self._run_here(jobs)
            return
        first = Ticket(jobs[0], self, prefetch=False)
        first.state = "running"
        tickets = [first, *self.begin(jobs[1:])]
        first.run()
        self.finish(tickets)

    def begin(self, jobs: Sequence[Callable[[], None]]) -> list[Ticket]:
        """Hand demand jobs over; `finish` waits for them."""
        tickets = [Ticket(job, self, prefetch=False) for job in jobs]
        with self._condition:
            self._start()
            self._demand.extend(tickets)
            self._condition.notify(len(tickets))
        return tickets

    def finish(self, tickets: Sequence[Ticket]) -> None:
        """Wait for demand jobs, running here what nobody has begun; raises as `run_all`."""
        for ticket in tickets:
            if ticket.cancel():  # sooner done here than handed over
                ticket.run()
        for ticket in tickets:
            ticket.wait_done()
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error

    def prefetch(self, job: Callable[[], None]) -> Ticket:
        """Queue a job behind all demand."""
        ticket = Ticket(job, self, prefetch=True)
        with self._condition:
            self._start()
            self._prefetch.append(ticket)
            self._condition.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        with self._condition:
            if ticket.state != "queued":
                return False
            (self._prefetch if ticket.prefetch else self._demand).remove(ticket)
            ticket.state = "cancelled"
            return True

    def close(self, timeout_s: float = 10.0) -> None:
        """End the threads after what they are reading; queued prefetches are dropped."""
        with self._condition:
            self._closed = True
            self._prefetch.clear()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        self._threads.clear()

    def _run_here(self, jobs: Sequence[Callable[[], None]]) -> None:
        first: BaseException | None = None
        for job in jobs:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised below, when every job has had its turn
                first = first or error
        if first is not None:
            raise first

    def _start(self) -> None:
        if self._closed:
            raise StoreError("the readers are closed", "Load the model again")
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._loop, name=f"titan-reader-{i}", daemon=True) for i in range(self.width)
            ]
            with every_core():
                for thread in self._threads:
                    thread.start()

    def _loop(self) -> None:
        while (ticket := self._take()) is not None:
            ticket.run()
            if ticket.prefetch:
                with self._condition:
                    self._prefetching -= 1
                    self._condition.notify()
            del ticket

    def _take(self) -> Ticket | None:
        with self._condition:
            while True:
                if self._demand:
                    ticket = self._demand.popleft()
                    ticket.state = "running"
                    return ticket
                if self._closed:
                    return None
                if self._prefetch and self._prefetching < self.width - 1:
                    self._prefetching += 1
                    ticket = self._prefetch.popleft()
                    ticket.state = "running"
                    return ticket
                self._condition.wait()
