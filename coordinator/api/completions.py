"""`POST /v1/completions`: one prompt or several, answered as choices with their indexes."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from titan.common.errors import InvalidRequest
from titan.coordinator.api.answers import Answer, collect_all, merged, require_whole
from titan.coordinator.api.body import read_object
from titan.coordinator.api.gate import CLIENT_CLOSED_REQUEST, request_id
from titan.coordinator.api.logprobs import completion_logprobs
from titan.coordinator.api.openapi import answers, takes
from titan.coordinator.api.schemas import CompletionRequest, validate
from titan.coordinator.api.service import Service
from titan.coordinator.api.sse import EventStream, data_event
from titan.coordinator.api.turn import check_biases, nth_choice
from titan.coordinator.api.usage import usage_body
from titan.coordinator.generation import (
    GenerationRequest,
    Handle,
    ServedModel,
    TextDelta,
    TokenLogprob,
    Usage,
    fit_max_tokens,
)

__all__ = ["completions_router"]

MAX_ANSWERS = 64


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=takes(CompletionRequest), responses=answers(streams=True))
    async def completions(request: Request) -> Response:
        body = validate(CompletionRequest, await read_object(request, service.limits))
        served = service.served(body.model)
        prompts = [await service.text_prompt(served, prompt) for prompt in body.prompt]
        check_biases(served, body.sampling)
        choices = body.n or 1
        if len(prompts) * choices > MAX_ANSWERS:
            raise InvalidRequest(
                f"{len(prompts)} prompts with {choices} answers each are more than {MAX_ANSWERS} answers",
                "send fewer at a time",
                param="n",
            )
        requests = [
            GenerationRequest(
                prompt=prompt,
                max_tokens=fit_max_tokens(
                    len(prompt),
                    body.max_tokens,
                    served.context_tokens,
                    default=service.limits.default_max_tokens,
                    param="prompt",
                ),
                sampling=body.sampling,
                stop=body.stop,
                top_logprobs=body.logprobs,
                request_id=request_id(request),
            )
            for prompt in prompts
        ]
        handles = service.engine.submit_all([nth_choice(r, i) for r in requests for i in range(choices)])
        shape = _Shape(body, served)
        if body.stream:
            return EventStream(shape.stream(handles), handles, comment_s=service.limits.stream_comment_s)
        answers = await collect_all(handles, request.receive)
        if answers is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(shape.whole(answers))

    return router


class _Shape:
    """One response in OpenAI's shape, whole or in chunks."""

    def __init__(self, body: CompletionRequest, served: ServedModel) -> None:
        self._body = body
        self._served = served
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            self._choice(index, answer.text, answer.tokens, answer.logprobs, reason=answer.finished.reason)
            for index, answer in enumerate(answers)
        ]
        return self._object(choices) | {"usage": usage_body(answer.finished.usage for answer in answers)}

    async def stream(self, handles: Sequence[Handle]) -> AsyncGenerator[bytes, None]:
        usages: list[Usage] = []
        offsets = [0] * len(handles)
        async for index, event in merged(handles):
            if isinstance(event, TextDelta):
                choice = self._choice(index, event.text, event.tokens, event.logprobs, offset=offsets[index])
                offsets[index] += len(event.text)
            else:
                require_whole(event)
                choice = self._choice(index, "", reason=event.reason)
                usages.append(event.usage)
            yield data_event(self._object([choice]) | ({"usage": None} if self._body.include_usage else {}))
        if self._body.include_usage:
            yield data_event(self._object([]) | {"usage": usage_body(usages)})

    def _choice(
        self,
        index: int,
        text: str,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        *,
        offset: int = 0,
        reason: str | None = None,
    ) -> dict[str, Any]:
        wanted = self._body.logprobs is not None and bool(logprobs)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": reason,
            "logprobs": completion_logprobs(self._served.vocabulary, logprobs, offset) if wanted else None,
        }
        return choice | {"token_ids": list(tokens)} if self._body.return_token_ids else choice

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._served.name,
            "choices": choices,
        }
