"""The two ends of a running request: the engine's thread writes events, one asyncio task reads them.

Knows nothing of MLX or HTTP.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from titan.common.errors import TitanError
from titan.coordinator.generation.events import Event, TextDelta
from titan.coordinator.generation.request import GenerationRequest

__all__ = ["Handle", "Job"]


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
        with self._lock:
            self._pending.append(event)
            if self._wake_scheduled:
                return
            self._wake_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the reader's loop is closed: nobody will read this answer
            self._cancelled = True

    async def take(self) -> list[Event | TitanError]:
        """Everything delivered since the last call, at least one; waits for it."""
        await self._wake.wait()
        with self._lock:
            taken = list(self._pending)
            self._pending.clear()
            self._wake.clear()
            self._wake_scheduled = False
        return taken


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
