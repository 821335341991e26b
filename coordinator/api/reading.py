"""Tells an answer's parts apart as its text arrives: reasoning, what is said, calls of tools. Knows no HTTP.

mlx-lm's state machine finds the marks and its parsers read the calls. A call that cannot be read comes out as the text
that it is, with a warning.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.common.log import get_logger
from titan.coordinator.api.tools import Tools

__all__ = ["Part", "Reader", "Reasoning", "Said", "ToolCall"]

log = get_logger("coordinator.api")


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


Part = Said | Reasoning | ToolCall


class Reader:
    """One answer.

    Args:
        tools: that the model may call; without any, marks of calls are text.
        prompt: tells whether the template has opened the model's reasoning already.
    """

    def __init__(self, tokenizer: TokenizerWrapper, tools: Tools, prompt: Sequence[int], request_id: str) -> None:
        self.warnings: list[str] = []
        self.calls = 0
        self._tokenizer = tokenizer
        self._tools = tools
        self._request_id = request_id
        self._call_text: str | None = None
        initial = "reasoning" if _reasons_already(tokenizer, prompt) else "normal"
        self._state: Any = None
        if tokenizer.has_thinking or tools:
            self._state = make_text_state_machine(tokenizer).make_state(initial)

    def push(self, text: str) -> list[Part]:
        """Take text, return the parts that are certain."""
        if self._state is None:
            return [Said(text)] if text else []
        machine = self._state
        self._state, segments = _split(machine, text)
        parts: list[Part] = []
        for state, piece in segments:
            self._take(state, piece, parts)
        self._leave(self._state[0], parts)
        return parts

    def finish(self) -> list[Part]:
        """The answer is over: what was held back, and a call that was not closed."""
        parts: list[Part] = []
        if self._state is not None:
            state, _, _, held = self._state
            self._take(state, held, parts)
            self._leave("", parts, closed=not self._tokenizer.tool_call_end)
        return parts

    def _take(self, state: str, piece: str, parts: list[Part]) -> None:
        if state == "tool" and self._tools:
            self._call_text = (self._call_text or "") + piece
            return
        self._leave(state, parts)
        if not piece:
            return
        kind = Reasoning if state == "reasoning" else Said
        if parts and type(parts[-1]) is kind:
            parts[-1] = kind(parts[-1].text + piece)  # type: ignore[union-attr]
        else:
            parts.append(kind(piece))

    def _leave(self, state: str, parts: list[Part], *, closed: bool = True) -> None:
        """If a call has ended, read it."""
        if self._call_text is None or state == "tool":
            return
        text, self._call_text = self._call_text, None
        calls = self._parsed(text)
        if calls:
            parts.extend(calls)
            self.calls += len(calls)
        else:
            start, end = self._tokenizer.tool_call_start or "", self._tokenizer.tool_call_end or ""
            parts.append(Said(f"{start}{text}{end if closed else ''}"))

    def _parsed(self, text: str) -> list[ToolCall]:
        parser = self._tokenizer.tool_parser
        try:
            found = parser(text, list(self._tools)) if parser is not None else []
            calls = [_call(call) for call in (found if isinstance(found, list) else [found])]
            known = {tool["function"]["name"] for tool in self._tools}
            unknown = [call.name for call in calls if call.name not in known]
            if unknown:
                raise ValueError(f"there is no tool {unknown[0]!r}")
            return calls
        except Exception as error:  # a parser meets whatever a model writes
            warning = f"a tool call could not be read and is part of the text ({type(error).__name__}: {error})"
            log.warning(warning[:500], exc_info=True, request=self._request_id)
            self.warnings.append(warning[:500])
            return []


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("it has no name")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", value["name"], text)


def _reasons_already(tokenizer: TokenizerWrapper, prompt: Sequence[int]) -> bool:
    if not tokenizer.has_thinking:
        return False
    tail = list(prompt[-64:])
    return tokenizer.rfind_think_start(tail) > tokenizer.rfind_think_end(tail)


def _split(state: Any, text: str) -> tuple[Any, list[tuple[str, str]]]:
    from mlx_lm.generate import TextStateMachine

    return TextStateMachine.split(state, text)
