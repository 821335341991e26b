"""What the endpoints share: the engine, the limits, and the way from a client's words to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from titan.common.errors import InvalidRequest, UnknownModel
from titan.coordinator.api.limits import Limits
from titan.coordinator.api.messages import Message
from titan.coordinator.api.schemas import Prompt
from titan.coordinator.generation import Engine, ServedModel

__all__ = ["DEFAULT_MODEL_NAME", "Readiness", "Service"]

DEFAULT_MODEL_NAME = "default"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be answered beyond the engine itself: the plan is installed.

    Args:
        ready: all is there.
        phase: in words, what is being waited for, or why it will not come.
    """

    ready: bool = True
    phase: str = "ready"


@dataclass(frozen=True)
class Service:
    """One per app. Tokenizing runs in a thread, one text at a time: a long prompt must not stop other streams."""

    engine: Engine
    limits: Limits
    readiness: Callable[[], Readiness]
    _tokenizing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def served(self, name: str | None) -> ServedModel:
        """The model that a request names.

        Raises:
            EngineNotReady: there is none yet.
            UnknownModel: it is called otherwise.
        """
        served = self.engine.served()
        if name not in (None, DEFAULT_MODEL_NAME, served.name):
            raise UnknownModel(
                f"the model {name[:200]!r} is not served here",
                f"use {served.name!r} or {DEFAULT_MODEL_NAME!r}",
                param="model",
            )
        return served

    async def chat_prompt(
        self,
        served: ServedModel,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
        values: Mapping[str, Any] | None = None,
        param: str = "messages",
    ) -> tuple[int, ...]:
        """Token ids of a conversation in the model's own chat template, open for the assistant's answer.

        Args:
            values: further variables of the template.
        """
        if not served.tokenizer.has_chat_template:
            raise InvalidRequest(f"the model {served.name} has no chat template", "use /v1/completions")

        def render() -> tuple[int, ...]:
            try:
                return tuple(
                    served.tokenizer.apply_chat_template(
                        list(messages), add_generation_prompt=True, tools=list(tools) or None, **(values or {})
                    )
                )
            except (TemplateError, ValueError, TypeError, LookupError) as error:
                raise InvalidRequest(
                    f"the chat template of {served.name} refuses these messages ({error})",
                    "change their roles or order",
                    param=param,
                ) from error

        return await self._tokenize(render)

    async def text_prompt(self, served: ServedModel, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a plain prompt; ids that come from the client are checked against the vocabulary."""
        tokenizer = served.tokenizer
        if isinstance(prompt, tuple):
            size = served.vocabulary.size
            bad = next((token for token in prompt if not 0 <= token < size), None)
            if bad is not None:
                raise InvalidRequest(
                    f"the prompt has token id {bad} and the vocabulary has {size} tokens",
                    f"send ids in 0..{size - 1}",
                    param="prompt",
                )
            return prompt
        bos = tokenizer.bos_token

        def encode() -> tuple[int, ...]:
            return tuple(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))

        tokens = await self._tokenize(encode)
        if tokens:
            return tokens
        if bos is None:
            raise InvalidRequest("the prompt is empty", "send some text", param="prompt")
        return (tokenizer.bos_token_id,)

    async def _tokenize(self, work: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        async with self._tokenizing:
            return await asyncio.to_thread(work)
