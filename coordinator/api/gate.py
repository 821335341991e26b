"""What every request passes first: its id, the Host check, the key; and what catches every error that nobody caught.

Pure ASGI, outside the router, so that nothing behind it can be reached around it.
"""

from __future__ import annotations

import re
import time
import uuid

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from titan.common.errors import EngineFailed, QueueFull, TitanError
from titan.common.log import get_logger
from titan.common.origin import check_local
from titan.coordinator.api.auth import ApiKeys, Key
from titan.coordinator.api.errors import error_response

__all__ = ["CLIENT_CLOSED_REQUEST", "Gate", "request_id"]

CLIENT_CLOSED_REQUEST = 499  # never sent; only the log shows it
_KEY_LIMIT_RETRY_S = 10.0
_OPEN_PATHS = ("/health", "/ready")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

log = get_logger("coordinator.api")


def request_id(request: Request) -> str:
    return request.scope["titan.request_id"]


class Gate:
    """ASGI middleware.

    Args:
        api_keys: None lets everyone in who comes through loopback.
        listen_host: the address the server listens on.
    """

    def __init__(self, app: ASGIApp, *, api_keys: ApiKeys | None, listen_host: str) -> None:
        self._app = app
        self._api_keys = api_keys
        self._listen_host = listen_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        identity = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["titan.request_id"] = identity.decode()
        status = 0
        started_s = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identity)]
            await send(message)

        try:
            try:
                scope["titan.key"] = self._admit(scope["path"], headers)
            except TitanError as error:
                retry_after_s = _KEY_LIMIT_RETRY_S if isinstance(error, QueueFull) else None
                response = error_response(error, scope["path"], retry_after_s=retry_after_s)
                await response(scope, receive, send_with_id)
                return
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.error("a request handler failed", exc_info=True, request=scope["titan.request_id"])
            if status:
                raise  # the answer has begun: the server can only cut the connection
            error = EngineFailed("the coordinator failed on this request", "its log has the reason under this id")
            await error_response(error, scope["path"])(scope, receive, send_with_id)
        finally:
            if scope["path"] not in _OPEN_PATHS:
                log.info(
                    "request",
                    request=scope["titan.request_id"],
                    **({} if (key := scope.get("titan.key")) is None else {"key": key.name}),
                    method=scope["method"],
                    path=scope["path"][:200],
                    status=status,
                    seconds=round(time.monotonic() - started_s, 3),
                )

    def _admit(self, path: str, headers: dict[bytes, bytes]) -> Key | None:
        """The request's key; None where none is asked for."""
        if self._api_keys is None:
            check_local(_text(headers.get(b"host")), _text(headers.get(b"origin")), self._listen_host)
            return None
        if path in _OPEN_PATHS:
            return None
        return self._api_keys.check(headers.get(b"authorization"), headers.get(b"x-api-key"))


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
