"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`: the same engine in another shape."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from titan.common.errors import InvalidRequest
from titan.coordinator.api.answers import Answer, collect_all, require_whole
from titan.coordinator.api.anthropic_schema import MessagesRequest
from titan.coordinator.api.body import read_object
from titan.coordinator.api.errors import anthropic_error_body
from titan.coordinator.api.gate import CLIENT_CLOSED_REQUEST, request_id
from titan.coordinator.api.openapi import answers, takes
from titan.coordinator.api.reading import Part, Reader, Reasoning, Said, ToolCall
from titan.coordinator.api.schemas import validate
from titan.coordinator.api.service import Service
from titan.coordinator.api.sse import EventStream, named_event
from titan.coordinator.api.turn import Begun, begin, turn_prompt
from titan.coordinator.generation import Finished, ServedModel, TextDelta, Usage

__all__ = ["anthropic_router"]


def anthropic_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=takes(MessagesRequest), responses=answers(streams=True, anthropic=True))
    async def messages(request: Request) -> Response:
        body = validate(MessagesRequest, await read_object(request, service.limits))
        if body.max_tokens is None:
            raise InvalidRequest("max_tokens is missing", "send the most tokens that you want", param="max_tokens")
        served = service.served(body.model)
        begun = await begin(service, served, body.turn, request_id(request))
        shape = _Shape(served, begun)
        if body.stream:
            return EventStream(
                shape.stream(),
                begun.handles,
                comment_s=service.limits.stream_comment_s,
                last=b"",
                on_error=lambda error: named_event(anthropic_error_body(error)),
            )
        answers = await collect_all(begun.handles, request.receive)
        if answers is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(shape.whole(answers[0]))

    @router.post("/v1/messages/count_tokens", openapi_extra=takes(MessagesRequest), responses=answers(anthropic=True))
    async def count_tokens(request: Request) -> dict[str, int]:
        body = validate(MessagesRequest, await read_object(request, service.limits))
        served = service.served(body.model)
        return {"input_tokens": len(await turn_prompt(service, served, body.turn))}

    return router


class _Shape:
    """One answer in Anthropic's shape, whole or as events."""

    def __init__(self, served: ServedModel, begun: Begun) -> None:
        self._served = served
        self._handle = begun.handles[0]
        self._reader = begun.readers[0]
        self._prompt_tokens = begun.prompt_tokens
        self._id = f"msg_{uuid.uuid4().hex[:24]}"

    def whole(self, answer: Answer) -> dict[str, Any]:
        parts = [*self._reader.push(answer.text), *self._reader.finish()]
        content: list[dict[str, Any]] = []
        for part in parts:
            block = _block(part)
            if content and block["type"] == content[-1]["type"] != "tool_use":
                key = _key(block)
                content[-1][key] += block[key]
            else:
                content.append(block)
        body = self._message(content, answer.finished.usage) | _end(answer.finished, self._reader)
        return body | {"warnings": self._reader.warnings} if self._reader.warnings else body

    async def stream(self) -> AsyncGenerator[bytes, None]:
        yield named_event({"type": "message_start", "message": self._message([], Usage(self._prompt_tokens, 0))})
        yield named_event({"type": "ping"})
        blocks = _Blocks()
        async for event in self._handle:
            if isinstance(event, TextDelta):
                for part in self._reader.push(event.text):
                    for data in blocks.events(part):
                        yield named_event(data)
                continue
            require_whole(event)
            for part in self._reader.finish():
                for data in blocks.events(part):
                    yield named_event(data)
            for data in blocks.close():
                yield named_event(data)
            usage = _usage(event.usage)
            yield named_event({"type": "message_delta", "delta": _end(event, self._reader), "usage": usage})
            yield named_event({"type": "message_stop"})

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._served.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


class _Blocks:
    """The content blocks of a stream: one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open = ""

    def events(self, part: Part) -> list[dict[str, Any]]:
        block = _block(part)
        found: list[dict[str, Any]] = []
        if block["type"] == "tool_use" or block["type"] != self._open:
            found.extend(self.close())
            self._index += 1
            self._open = block["type"]
            empty = block | ({"input": {}} if block["type"] == "tool_use" else {_key(block): ""})
            found.append({"type": "content_block_start", "index": self._index, "content_block": empty})
        if isinstance(part, ToolCall):
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
        else:
            delta = {"type": f"{_key(block)}_delta", _key(block): part.text}
        found.append({"type": "content_block_delta", "index": self._index, "delta": delta})
        return found

    def close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._index}]


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": json.loads(part.arguments)}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    assert isinstance(part, Said)
    return {"type": "text", "text": part.text}


def _key(block: dict[str, Any]) -> str:
    return str(block["type"])


def _end(finished: Finished, reader: Reader) -> dict[str, Any]:
    if finished.reason == "length":
        reason = "max_tokens"
    elif reader.calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if finished.stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": finished.stop_string}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts what came from a cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
