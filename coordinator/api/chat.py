"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from titan.coordinator.api.answers import Answer, collect_all, merged, require_whole
from titan.coordinator.api.body import read_object
from titan.coordinator.api.gate import CLIENT_CLOSED_REQUEST, request_id
from titan.coordinator.api.logprobs import chat_logprobs
from titan.coordinator.api.openapi import answers, takes
from titan.coordinator.api.reading import Part, Reader, Reasoning, Said, ToolCall
from titan.coordinator.api.schemas import ChatRequest, validate
from titan.coordinator.api.service import Service
from titan.coordinator.api.sse import EventStream, data_event
from titan.coordinator.api.turn import Begun, Turn, begin
from titan.coordinator.api.usage import usage_body
from titan.coordinator.generation import Finished, ServedModel, TextDelta, TokenLogprob, Usage

__all__ = ["chat_router"]


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses=answers(streams=True))
    async def chat_completions(request: Request) -> Response:
        body = validate(ChatRequest, await read_object(request, service.limits))
        served = service.served(body.model)
        begun = await begin(service, served, _turn(body), request_id(request))
        shape = _Shape(body, served, begun)
        if body.stream:
            return EventStream(shape.stream(), begun.handles, comment_s=service.limits.stream_comment_s)
        answers = await collect_all(begun.handles, request.receive)
        if answers is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(shape.whole(answers))

    return router


def _turn(body: ChatRequest) -> Turn:
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return Turn(
        messages=body.messages,
        sampling=body.sampling,
        max_tokens=body.answer_tokens,
        stop=body.stop,
        top_logprobs=body.wanted_logprobs,
        tools=body.tools,
        choice=body.tool_choice,
        form=body.response_format,
        choices=body.n or 1,
        template_values={**(body.chat_template_kwargs or {}), **effort},
    )


class _Shape:
    """One response in OpenAI's shape, whole or in chunks."""

    def __init__(self, body: ChatRequest, served: ServedModel, begun: Begun) -> None:
        self._body = body
        self._served = served
        self._begun = begun
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            self._whole_choice(i, answer, reader)
            for i, (answer, reader) in enumerate(zip(answers, self._begun.readers, strict=True))
        ]
        body = self._object("chat.completion", choices)
        warnings = [warning for reader in self._begun.readers for warning in reader.warnings]
        return (
            body | {"usage": _usage([a.finished.usage for a in answers])} | ({"warnings": warnings} if warnings else {})
        )

    def _whole_choice(self, index: int, answer: Answer, reader: Reader) -> dict[str, Any]:
        parts = [*reader.push(answer.text), *reader.finish()]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        text = "".join(part.text for part in parts if isinstance(part, Said))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        choice = self._choice(index, answer.tokens, answer.logprobs, _reason(answer.finished, reader))
        return choice | {"message": message}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        for index in range(len(self._begun.handles)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        held = [_Held() for _ in self._begun.handles]
        usages: list[Usage] = []
        async for index, event in merged(self._begun.handles):
            reader = self._begun.readers[index]
            if isinstance(event, TextDelta):
                calls = reader.calls
                held[index].take(event)
                for chunk in self._parts(index, reader.push(event.text), calls, held[index]):
                    yield chunk
                continue
            require_whole(event)
            calls = reader.calls
            for chunk in self._parts(index, reader.finish(), calls, held[index]):
                yield chunk
            yield self._chunk(index, {}, *held[index].give(), reason=_reason(event, reader), warnings=reader.warnings)
            usages.append(event.usage)
        if self._body.include_usage:
            yield data_event(self._object("chat.completion.chunk", []) | {"usage": _usage(usages)})

    def _parts(self, index: int, parts: Sequence[Part], calls: int, held: _Held) -> list[bytes]:
        chunks = []
        for part in parts:
            if isinstance(part, ToolCall):
                delta: dict[str, Any] = {"tool_calls": [{"index": calls} | _call(part)]}
                calls += 1
            else:
                delta = {"content" if isinstance(part, Said) else "reasoning_content": part.text}
            chunks.append(self._chunk(index, delta, *held.give()))
        return chunks

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        reason: str | None = None,
        warnings: Sequence[str] = (),
    ) -> bytes:
        choice = self._choice(index, tokens, logprobs, reason) | {"delta": delta}
        chunk = self._object("chat.completion.chunk", [choice])
        if warnings:
            chunk["warnings"] = list(warnings)
        return data_event(chunk | {"usage": None} if self._body.include_usage else chunk)

    def _choice(
        self, index: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], reason: str | None
    ) -> dict[str, Any]:
        wanted = self._body.wanted_logprobs is not None and bool(logprobs)
        choice: dict[str, Any] = {
            "index": index,
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


class _Held:
    """Tokens and log-probabilities of text that a reader still holds back."""

    def __init__(self) -> None:
        self._tokens: tuple[int, ...] = ()
        self._logprobs: tuple[TokenLogprob, ...] = ()

    def take(self, delta: TextDelta) -> None:
        self._tokens += delta.tokens
        self._logprobs += delta.logprobs

    def give(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        given = self._tokens, self._logprobs
        self._tokens, self._logprobs = (), ()
        return given


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(finished: Finished, reader: Reader) -> str:
    return "tool_calls" if reader.calls and finished.reason == "stop" else finished.reason


def _usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Several choices share one prompt, which counts once."""
    first = usages[0]
    shared = Usage(first.prompt_tokens, sum(u.completion_tokens for u in usages), first.cached_tokens)
    return usage_body([shared])
