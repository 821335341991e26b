"""An answer as server-sent events, with comments that keep a silent connection open. Knows no protocol's fields."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from titan.common.errors import TitanError
from titan.coordinator.api.answers import followed
from titan.coordinator.api.errors import error_body
from titan.coordinator.generation import Handle

__all__ = ["DONE", "EventStream", "data_event", "named_event"]

DONE = b"data: [DONE]\n\n"


def data_event(value: dict[str, Any]) -> bytes:
    """One event without a name."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One event, named by its `type`."""
    return b"event: " + value["type"].encode() + b"\n" + data_event(value)


def _openai_error(error: TitanError) -> bytes:
    return data_event(error_body(error))


class EventStream(Response):
    """Sends `events` as they come. A client that disconnects, or a stream that fails, cancels `handles`.

    Args:
        events: what is sent, each a whole event.
        comment_s: after so long without an event a comment says how far the prompt is.
        last: what ends a stream that did not fail.
        on_error: the event that ends one that did.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        handles: Sequence[Handle],
        *,
        comment_s: float,
        last: bytes = DONE,
        on_error: Callable[[TitanError], bytes] = _openai_error,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._handles = handles
        self._comment_s = comment_s
        self._last = last
        self._on_error = on_error
        self._sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        commenter = asyncio.create_task(self._comment(send))
        try:
            async with followed(self._handles, receive), contextlib.aclosing(self._events) as events:
                try:
                    async for event in events:
                        self._sent_s = time.monotonic()
                        await send(_part(event))
                    last = self._last
                except TitanError as error:
                    last = self._on_error(error)
        finally:
            commenter.cancel()
            await asyncio.gather(commenter, return_exceptions=True)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _comment(self, send: Send) -> None:
        while True:
            quiet_s = time.monotonic() - self._sent_s
            if quiet_s < self._comment_s:
                await asyncio.sleep(self._comment_s - quiet_s)
                continue
            done = min(handle.prefilled_tokens for handle in self._handles)
            total = max(len(handle.request.prompt) for handle in self._handles)
            self._sent_s = time.monotonic()
            await send(_part(f": {done} of {total} prompt tokens\n\n".encode()))


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
