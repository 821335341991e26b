"""HTTP/1.1 connections that cannot wait for ever. Adds deadlines to uvicorn's h11 protocol; knows no request.

uvicorn bounds only the pause between two requests. Here a request's head has to arrive in time, what is left of a
refused body too, and a client that stops reading its answer is cut off.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from titan.common.errors import InvalidRequest
from titan.coordinator.api.errors import error_body
from titan.coordinator.api.limits import Limits

__all__ = ["bounded_protocol"]


def bounded_protocol(limits: Limits) -> type[H11Protocol]:
    """uvicorn's h11 protocol with the deadlines of `limits`."""

    class BoundedProtocol(H11Protocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.idle_timer: asyncio.TimerHandle | None = None
            self.write_timer: asyncio.TimerHandle | None = None

        @property
        def answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.watch_idle(limits.head_s)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.answering and self.idle_timer is not None:
                self.idle_timer.cancel()
                self.idle_timer = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.answering:
                self.watch_idle(limits.keep_alive_s + limits.head_s)

        def pause_writing(self) -> None:
            super().pause_writing()
            self.write_timer = self.loop.call_later(limits.stalled_write_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.forget(self.write_timer)

        def connection_lost(self, exc: Exception | None) -> None:
            self.forget(self.idle_timer, self.write_timer)
            super().connection_lost(exc)

        def watch_idle(self, deadline_s: float) -> None:
            """From now the head of the next request has `deadline_s` to arrive, however it trickles in."""
            self.forget(self.idle_timer)
            self.idle_timer = self.loop.call_later(deadline_s, self.end_idle)

        def end_idle(self) -> None:
            if not self.answering:
                self.transport.abort()

        @staticmethod
        def forget(*timers: asyncio.TimerHandle | None) -> None:
            for timer in timers:
                if timer is not None:
                    timer.cancel()

        def send_400_response(self, msg: str) -> None:
            del msg  # uvicorn's own words
            error = InvalidRequest(
                "this is not a valid HTTP/1.1 request", f"keep its head below {limits.head_bytes} bytes"
            )
            body = json.dumps(error_body(error)).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return BoundedProtocol
