"""Reads a request's JSON body, bounded in bytes, time and depth. Knows no field of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from fastapi import Request

from titan.common.errors import InvalidRequest, RequestTimeout, RequestTooLarge
from titan.coordinator.api.limits import Limits

__all__ = ["MAX_DEPTH", "parse_object", "read_object"]

MAX_DEPTH = 64
_PARSE_IN_THREAD_BYTES = 64 << 10


async def read_object(request: Request, limits: Limits) -> dict[str, Any]:
    """The JSON object in the body.

    Raises:
        RequestTooLarge: more bytes than allowed, announced or sent.
        RequestTimeout: it did not arrive in time.
        InvalidRequest: compressed, not UTF-8, not JSON, no object, nested too deeply, NaN or infinite numbers.
        ClientDisconnect: starlette's, when the client went away.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest(f"the body has content-encoding {encoding[:40]!r}", "send it uncompressed")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limits.body_bytes:
                    raise _too_large(limits)
                body += chunk
    except TimeoutError:
        raise RequestTimeout(
            f"the body did not arrive within {limits.body_s:g} s", "send the whole request at once"
        ) from None
    if len(body) > _PARSE_IN_THREAD_BYTES:
        return await asyncio.to_thread(parse_object, bytes(body))
    return parse_object(bytes(body))


def parse_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object whose strings are all valid Unicode; raises InvalidRequest."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})", "encode it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON ({error.msg}, line {error.lineno} column {error.colno})", "send a JSON object"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # a number of thousands of digits
        raise InvalidRequest(f"the body has a number that cannot be read ({error})", "send smaller numbers") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object", 'send an object, as in {"model": …}')
    _check(value)
    return value


def _check(root: dict[str, Any]) -> None:
    """Refuse deep nesting and half surrogate pairs, without recursion."""
    pending: list[tuple[Any, int]] = [(root, 1)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise InvalidRequest(
                    "a string of the body has half of a surrogate pair", "escape characters beyond U+FFFF as pairs"
                ) from None
            continue
        if depth > MAX_DEPTH:
            raise _too_deep()
        if isinstance(value, dict):
            pending.extend((key, depth) for key in value)
            pending.extend((item, depth + 1) for item in value.values() if isinstance(item, str | list | dict))
        else:
            pending.extend((item, depth + 1) for item in value if isinstance(item, str | list | dict))


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        _no_constant(text)
    return value


def _no_constant(text: str) -> NoReturn:
    raise InvalidRequest(f"the body has the number {text[:40]}, which JSON does not have", "send finite numbers")


def _too_large(limits: Limits) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {limits.body_bytes} bytes", "send a shorter request")


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body is nested more than {MAX_DEPTH} levels deep", "flatten it")
