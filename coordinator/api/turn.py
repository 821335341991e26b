"""One turn of a conversation, whichever protocol it came in: from checked fields to running requests and readers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titan.common.errors import InvalidRequest
from titan.coordinator.api.forms import AnswerForm
from titan.coordinator.api.harmony import FINAL, speaks_harmony
from titan.coordinator.api.messages import Message
from titan.coordinator.api.reading import Reader, reader_for
from titan.coordinator.api.service import Service
from titan.coordinator.api.tools import ToolChoice, Tools, forced_call
from titan.coordinator.generation import GenerationRequest, Handle, Sampling, ServedModel, fit_max_tokens

__all__ = ["Begun", "Turn", "begin", "check_biases", "nth_choice", "turn_prompt"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client asks for.

    Args:
        messages: the conversation, as chat templates read it.
        max_tokens: of the answer; None for what fits, within the server's limit.
        tools, choice: what the model may call, and whether it has to.
        form: of the answer.
        choices: answers wanted.
        template_values: for the chat template.
        messages_param, form_param: what the client calls these fields, for errors.
    """

    messages: tuple[Message, ...]
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    tools: Tools = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    form: AnswerForm = field(default_factory=AnswerForm)
    choices: int = 1
    template_values: Mapping[str, Any] = field(default_factory=dict)
    messages_param: str = "messages"
    form_param: str = "response_format"


@dataclass(frozen=True, slots=True)
class Begun:
    """Requests under way, and what reads each one's answer."""

    handles: list[Handle]
    readers: list[Reader]
    prompt_tokens: int


async def turn_prompt(service: Service, served: ServedModel, turn: Turn) -> tuple[int, ...]:
    """Token ids of the conversation, tools included."""
    tools = _usable_tools(served, turn)
    values = dict(turn.template_values)
    if "reasoning_effort" in values and "reasoning_effort" not in str(served.tokenizer.chat_template):
        raise InvalidRequest(
            f"the chat template of {served.name} knows no reasoning_effort", "leave it out", param="reasoning_effort"
        )
    if _forced(turn, tools) or turn.form.grammar is not None:
        values.setdefault("enable_thinking", False)  # the grammar has no room for reasoning
    prompt = await service.chat_prompt(served, turn.messages, tools=tools, values=values, param=turn.messages_param)
    if turn.form.grammar is not None and speaks_harmony(served.tokenizer):
        prompt += tuple(served.tokenizer.encode(FINAL, add_special_tokens=False))
    return prompt


async def begin(service: Service, served: ServedModel, turn: Turn, request_id: str) -> Begun:
    """Submit the turn.

    Raises:
        InvalidRequest: the model or its template cannot do what is asked for.
        ContextTooLong, QueueFull, EngineNotReady: as the engine has it.
    """
    tools = _usable_tools(served, turn)
    grammar = turn.form.grammar
    if grammar is not None and tools:
        raise InvalidRequest(
            "a form of the answer and tools exclude each other here", 'send tool_choice "none"', param=turn.form_param
        )
    if _forced(turn, tools):
        grammar = forced_call(served, tools, turn.choice)
    if grammar is not None:
        param = turn.form_param if turn.form.grammar is not None else "tools"
        await asyncio.to_thread(served.grammars.check, grammar, param)
    check_biases(served, turn.sampling)
    prompt = await turn_prompt(service, served, turn)
    request = GenerationRequest(
        prompt=prompt,
        max_tokens=fit_max_tokens(
            len(prompt),
            turn.max_tokens,
            served.context_tokens,
            default=service.limits.default_max_tokens,
            param=turn.messages_param,
        ),
        sampling=turn.sampling,
        stop=turn.stop,
        top_logprobs=turn.top_logprobs,
        grammar=grammar,
        request_id=request_id,
    )
    readers = [reader_for(served.tokenizer, tools, prompt, request_id) for _ in range(turn.choices)]
    handles = service.engine.submit_all([nth_choice(request, i) for i in range(turn.choices)])
    return Begun(handles, readers, len(prompt))


def check_biases(served: ServedModel, sampling: Sampling) -> None:
    """Raise InvalidRequest for a biased token that the vocabulary does not have."""
    size = served.vocabulary.size
    for token, _ in sampling.logit_bias:
        if token >= size:
            raise InvalidRequest(
                f"logit_bias has token id {token} and the vocabulary has {size} tokens",
                f"send ids in 0..{size - 1}",
                param="logit_bias",
            )


def nth_choice(request: GenerationRequest, index: int) -> GenerationRequest:
    """The request of one of several answers: a seed is counted up, or all would be the same."""
    seed = request.sampling.seed
    if seed is None or index == 0:
        return request
    return replace(request, sampling=replace(request.sampling, seed=seed + index))


def _usable_tools(served: ServedModel, turn: Turn) -> Tools:
    tools = () if turn.choice.kind == "none" else turn.tools
    if tools and not (served.tokenizer.has_tool_calling or speaks_harmony(served.tokenizer)):
        raise InvalidRequest(f"the model {served.name} cannot call tools", "leave tools out", param="tools")
    if turn.choice.kind == "required" and not tools:
        raise InvalidRequest("tool_choice asks for a tool and there are none", "send tools", param="tool_choice")
    return tools


def _forced(turn: Turn, tools: Sequence[Any]) -> bool:
    return bool(tools) and turn.choice.kind == "required"
