"""The two ends of a running request: the engine's thread writes events, one asyncio task reads them.

Knows nothing of MLX or HTTP.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable

from titan.common.errors import TitanError
from titan.coordinator.generation.events import Event, Finished, TextDelta
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

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            texts: list[TextDelta] = []
            for item in await self._job.take():
                if isinstance(item, TextDelta):
                    texts.append(item)
                    continue
                if texts:
                    yield _joined(texts)
                    texts = []
                if isinstance(item, TitanError):
                    raise item
                yield item
                if isinstance(item, Finished):
                    return
            if texts:
                yield _joined(texts)


def _joined(texts: list[TextDelta]) -> TextDelta:
    if len(texts) == 1:
        return texts[0]
    return TextDelta(
        "".join(t.text for t in texts),
        tuple(token for t in texts for token in t.tokens),
        tuple(logprob for t in texts for logprob in t.logprobs),
    )
