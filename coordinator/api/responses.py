"""OpenAI's `POST /v1/responses`: text, reasoning and calls of functions, whole or as events. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from titan.common.errors import TitanError
from titan.coordinator.api.answers import Answer, collect_all, require_whole
from titan.coordinator.api.body import read_object
from titan.coordinator.api.errors import error_body
from titan.coordinator.api.gate import CLIENT_CLOSED_REQUEST, request_id
from titan.coordinator.api.openapi import answers, takes
from titan.coordinator.api.response_items import Items
from titan.coordinator.api.responses_schema import ResponsesRequest
from titan.coordinator.api.schemas import validate
from titan.coordinator.api.service import Service
from titan.coordinator.api.sse import EventStream, named_event
from titan.coordinator.api.turn import Begun, begin
from titan.coordinator.generation import Finished, ServedModel, TextDelta, Usage

__all__ = ["responses_router"]


def responses_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=takes(ResponsesRequest), responses=answers(streams=True))
    async def responses(request: Request) -> Response:
        body = validate(ResponsesRequest, await read_object(request, service.limits))
        served = service.served(body.model)
        begun = await begin(service, served, body.turn, request_id(request))
        shape = _Shape(body, served, begun)
        if body.stream:
            return EventStream(
                shape.stream(),
                begun.handles,
                comment_s=service.limits.stream_comment_s,
                last=b"",
                on_error=shape.failed,
            )
        answers = await collect_all(begun.handles, request.receive)
        if answers is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(shape.whole(answers[0]))

    return router


class _Shape:
    def __init__(self, body: ResponsesRequest, served: ServedModel, begun: Begun) -> None:
        self._body = body
        self._served = served
        self._handle = begun.handles[0]
        self._reader = begun.readers[0]
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._number = -1
        self._items = Items()

    def whole(self, answer: Answer) -> dict[str, Any]:
        for part in [*self._reader.push(answer.text), *self._reader.finish()]:
            self._items.take(part)
        self._items.close()
        return self._response(answer.finished)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        yield self._event({"type": "response.created", "response": self._response(None)})
        yield self._event({"type": "response.in_progress", "response": self._response(None)})
        async for event in self._handle:
            if isinstance(event, TextDelta):
                for part in self._reader.push(event.text):
                    for data in self._items.take(part):
                        yield self._event(data)
                continue
            require_whole(event)
            for part in self._reader.finish():
                for data in self._items.take(part):
                    yield self._event(data)
            for data in self._items.close():
                yield self._event(data)
            body = self._response(event)
            yield self._event({"type": f"response.{body['status']}", "response": body})

    def failed(self, error: TitanError) -> bytes:
        """The event that ends a stream that failed."""
        body = self._response(None) | {"status": "failed"}
        body["error"] = {"code": "server_error", "message": error_body(error)["error"]["message"]}
        return self._event({"type": "response.failed", "response": body})

    def _event(self, data: dict[str, Any]) -> bytes:
        self._number += 1
        return named_event(data | {"sequence_number": self._number})

    def _response(self, finished: Finished | None) -> dict[str, Any]:
        cut = finished is not None and finished.reason == "length"
        body = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if finished is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": self._body.instructions,
            "max_output_tokens": self._body.max_output_tokens,
            "model": self._served.name,
            "output": self._items.done if finished is not None else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if self._body.temperature is None else self._body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": _choice(self._body),
            "tools": [{"type": "function", "strict": False} | tool["function"] for tool in self._body.tools],
            "top_p": 1.0 if self._body.top_p is None else self._body.top_p,
            "truncation": "disabled",
            "usage": None if finished is None else _usage(finished.usage),
            "metadata": self._body.metadata or {},
        }
        return body | {"warnings": self._reader.warnings} if self._reader.warnings else body


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    return choice.kind if choice.name is None else {"type": "function", "name": choice.name}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
