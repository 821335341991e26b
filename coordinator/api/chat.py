"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from titan.coordinator.api.answers import Answer, collect_all, require_whole
from titan.coordinator.api.body import read_object
from titan.coordinator.api.gate import CLIENT_CLOSED_REQUEST, request_id
from titan.coordinator.api.logprobs import chat_logprobs
from titan.coordinator.api.schemas import ChatRequest, validate
from titan.coordinator.api.service import Service
from titan.coordinator.api.sse import EventStream
from titan.coordinator.api.usage import usage_body
from titan.coordinator.generation import (
    Finished,
    GenerationRequest,
    Handle,
    ServedModel,
    TextDelta,
    TokenLogprob,
    fit_max_tokens,
)

__all__ = ["chat_router"]


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = validate(ChatRequest, await read_object(request, service.limits))
        served = service.served(body.model)
        prompt = await service.chat_prompt(served, body.messages)
        handle = service.engine.submit(
            GenerationRequest(
                prompt=prompt,
                max_tokens=fit_max_tokens(
                    len(prompt), body.answer_tokens, served.context_tokens, default=service.limits.default_max_tokens
                ),
                sampling=body.sampling,
                stop=body.stop,
                top_logprobs=body.wanted_logprobs,
                request_id=request_id(request),
            )
        )
        shape = _Shape(body, served, handle)
        if body.stream:
            return EventStream(shape.stream(), [handle])
        answers = await collect_all([handle], request.receive)
        if answers is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(shape.whole(answers[0]))

    return router


class _Shape:
    """One response in OpenAI's shape, whole or in chunks."""

    def __init__(self, body: ChatRequest, served: ServedModel, handle: Handle) -> None:
        self._body = body
        self._served = served
        self._handle = handle
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = self._choice(answer.tokens, answer.logprobs, answer.finished.reason)
        choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        return self._object("chat.completion", [choice]) | {"usage": usage_body([answer.finished.usage])}

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        yield self._chunk({"role": "assistant", "content": ""})
        async for event in self._handle:
            if isinstance(event, TextDelta):
                yield self._chunk({"content": event.text}, event.tokens, event.logprobs)
                continue
            require_whole(event)
            yield self._chunk({}, reason=event.reason)
            if self._body.include_usage:
                yield self._usage_chunk(event)

    def _chunk(
        self,
        delta: dict[str, str],
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = self._choice(tokens, logprobs, reason) | {"delta": delta}
        chunk = self._object("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self._body.include_usage else chunk

    def _usage_chunk(self, finished: Finished) -> dict[str, Any]:
        return self._object("chat.completion.chunk", []) | {"usage": usage_body([finished.usage])}

    def _choice(
        self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], reason: str | None
    ) -> dict[str, Any]:
        wanted = self._body.wanted_logprobs is not None and bool(logprobs)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": reason,
            "logprobs": chat_logprobs(self._served.vocabulary, logprobs) if wanted else None,
        }
        return choice | {"token_ids": list(tokens)} if self._body.return_token_ids else choice

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
            "choices": choices,
        }
