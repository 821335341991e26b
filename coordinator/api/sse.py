"""An answer as server-sent events: one JSON object a `data:` line, `[DONE]` or an error at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from titan.common.errors import TitanError
from titan.coordinator.api.answers import followed
from titan.coordinator.api.errors import error_body
from titan.coordinator.generation import Handle

__all__ = ["EventStream"]


class EventStream(Response):
    """Sends `chunks` as they come. A client that disconnects, or a stream that fails, cancels `handles`."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], handles: Sequence[Handle]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._handles = handles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with followed(self._handles, receive), contextlib.aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})
                last = b"data: [DONE]\n\n"
            except TitanError as error:
                last = _event(error_body(error))
            await send({"type": "http.response.body", "body": last, "more_body": False})


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
