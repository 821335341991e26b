"""The two ends of a running request: the engine's thread writes events, one asyncio task reads them.

Knows nothing of MLX or HTTP.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable

from titan.common.errors import TitanError
from titan.coordinator.generation.events import Event, TextDelta
from titan.coordinator.generation.request import GenerationRequest

__all__ = ["Handle", "Job", "wake"]


class Job:
    """The engine's end. `max_tokens` bounds the events; a reader that lags gets its text in fewer, larger pieces."""

    def __init__(self, request: GenerationRequest, loop: asyncio.AbstractEventLoop, submitted_s: float) -> None:
        self.request = request
        self.submitted_s = submitted_s
        self.prefilled_tokens = 0
        self.generated_tokens = 0
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: deque[Event | TitanError] = deque()
        self._wake = asyncio.Event()
        self._wake_scheduled = False
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def mark_cancelled(self) -> None:
        self._cancelled = True

    def deliver(self, event: Event | TitanError) -> None:
        """Hand an event, or the error that ended the request, to the reader. From any thread, never waits."""
        if self.post(event):
            wake([self])

    def post(self, event: Event | TitanError) -> bool:
        """As `deliver`, but True when the reader is to be woken by `wake`: once a step for all readers is cheaper."""
        with self._lock:
            self._pending.append(event)
            asleep, self._wake_scheduled = not self._wake_scheduled, True
            return asleep

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def woken(self) -> None:
        """In the reader's loop: let it take what was delivered."""
        self._wake.set()

    async def take(self) -> list[Event | TitanError]:
        """Everything delivered since the last call, at least one; waits for it."""
        await self._wake.wait()
        with self._lock:
            taken = list(self._pending)
            self._pending.clear()
            self._wake.clear()
            self._wake_scheduled = False
        return taken


def wake(jobs: Iterable[Job]) -> None:
    """Wake the readers of some jobs, each loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        loops.setdefault(job.loop, []).append(job)
    for loop, own in loops.items():
        try:
            loop.call_soon_threadsafe(_woken, own)
        except RuntimeError:  # the readers' loop is closed: nobody will read these answers
            for job in own:
                job.mark_cancelled()


def _woken(jobs: list[Job]) -> None:
    for job in jobs:
        job.woken()


class Handle:
    """The client's end: iterate over it for the events, in the loop that submitted the request.

    The last event is `Finished`; a request that fails raises its `TitanError` instead.
    """

    def __init__(self, job: Job, cancel: Callable[[Job], None]) -> None:
        self._job = job
        self._cancel = cancel
        self._taken: deque[Event | TitanError] = deque()
        self._over = False

    @property
    def request(self) -> GenerationRequest:
        return self._job.request

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens processed so far."""
        return self._job.prefilled_tokens

    @property
    def generated_tokens(self) -> int:
        return self._job.generated_tokens

    def cancel(self) -> None:
        """End the request within a step; harmless when it is over. Iteration ends with `Finished("cancelled")`."""
        self._cancel(self._job)

    def __aiter__(self) -> Handle:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        if not self._taken:
            self._taken.extend(await self._job.take())
        item = self._taken.popleft()
        if isinstance(item, TextDelta):
            texts = [item]
            while self._taken and isinstance(following := self._taken[0], TextDelta):
                texts.append(following)
                self._taken.popleft()
            return _joined(texts)
        self._over = True
        if isinstance(item, TitanError):
            raise item
        return item


def _joined(texts: list[TextDelta]) -> TextDelta:
    if len(texts) == 1:
        return texts[0]
    return TextDelta(
        "".join(t.text for t in texts),
        tuple(token for t in texts for token in t.tokens),
        tuple(logprob for t in texts for logprob in t.logprobs),
    )
