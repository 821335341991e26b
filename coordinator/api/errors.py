"""Titan's errors in the shape that OpenAI's clients expect. The sentence is the error's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from titan.common.errors import (
    ContextTooLong,
    EngineNotReady,
    QueueFull,
    RequestError,
    TitanError,
    Unauthorized,
    UnknownModel,
)

__all__ = ["anthropic_error_body", "error_body", "error_response", "http_exception_response", "titan_error_response"]

# Codes that OpenAI's clients and the tools built on them look for.
_OPENAI_CODES: dict[type[TitanError], str] = {
    ContextTooLong: "context_length_exceeded",
    UnknownModel: "model_not_found",
    Unauthorized: "invalid_api_key",
}
_NOT_READY_RETRY_S = 5
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: TitanError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    if isinstance(error, QueueFull):
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if isinstance(error, RequestError) else "server_error"
    return _body(
        str(error),
        kind,
        error.param if isinstance(error, RequestError) else None,
        _OPENAI_CODES.get(type(error), error.code),
    )


def anthropic_error_body(error: TitanError) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}}`."""
    kind = _ANTHROPIC_TYPES.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def error_response(error: TitanError, path: str = "", *, retry_after_s: float | None = None) -> JSONResponse:
    """`error` as an HTTP answer with its own status, the headers that belong to it, and the shape of `path`."""
    headers: dict[str, str] = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, EngineNotReady):
        retry_after_s = _NOT_READY_RETRY_S
    if retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(retry_after_s))
    body = anthropic_error_body(error) if path.startswith(_ANTHROPIC_PATH) else error_body(error)
    return JSONResponse(body, error.http_status, headers)


async def titan_error_response(request: Request, error: Exception) -> Response:
    """FastAPI's handler for TitanError."""
    assert isinstance(error, TitanError)
    retry_after_s = request.app.state.engine.retry_after_s() if isinstance(error, QueueFull) else None
    return error_response(error, request.url.path, retry_after_s=retry_after_s)


async def http_exception_response(request: Request, error: Exception) -> Response:
    """FastAPI's handler for the router's own refusals: no such path, method not allowed."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path[:200]} is not part of this API ({status.phrase.lower()})."
    headers: Mapping[str, str] | None = error.headers
    if request.url.path.startswith(_ANTHROPIC_PATH):
        kind = _ANTHROPIC_TYPES.get(error.status_code, "invalid_request_error")
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
        return JSONResponse(body, error.status_code, dict(headers or {}))
    body = _body(message, "invalid_request_error", None, status.name.lower())
    return JSONResponse(body, error.status_code, dict(headers or {}))


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
