"""Tells an answer's parts apart as its text arrives: reasoning, what is said, calls of tools. Knows no HTTP.

mlx-lm's state machine finds the marks and its parsers read the calls; `harmony` does both for gpt-oss. A call that
cannot be read comes out as the text that it is, with a warning.
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
from titan.coordinator.api.harmony import HarmonyState, call_header, speaks_harmony, tail_text
from titan.coordinator.api.tools import Tools

__all__ = ["HarmonyReader", "Part", "Reader", "Reasoning", "Said", "ToolCall", "reader_for"]

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


def reader_for(tokenizer: TokenizerWrapper, tools: Tools, prompt: Sequence[int], request_id: str) -> Reader:
    """A reader of one answer in the form that the tokenizer's model writes. Arguments: as `Reader`."""
    return (HarmonyReader if speaks_harmony(tokenizer) else Reader)(tokenizer, tools, prompt, request_id)


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
        if piece:
            _add(parts, (Reasoning if state == "reasoning" else Said)(piece))

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
            self._check_known(calls)
            return calls
        except Exception as error:  # a parser meets whatever a model writes
            log.warning(self._warning(error), exc_info=True, request=self._request_id)
            return []

    def _check_known(self, calls: Sequence[ToolCall]) -> None:
        known = {tool["function"]["name"] for tool in self._tools}
        unknown = [call.name for call in calls if call.name not in known]
        if unknown:
            raise ValueError(f"there is no tool {unknown[0]!r}")

    def _warning(self, error: Exception) -> str:
        """Note for the client that a call could not be read."""
        warning = f"a tool call could not be read and is part of the text ({type(error).__name__}: {error})"[:500]
        self.warnings.append(warning)
        return warning


class HarmonyReader(Reader):
    """One answer in gpt-oss' channels: analysis is reasoning, what is addressed to a function is a call."""

    def __init__(self, tokenizer: TokenizerWrapper, tools: Tools, prompt: Sequence[int], request_id: str) -> None:
        super().__init__(tokenizer, tools, prompt, request_id)
        self._channels = HarmonyState(tail_text(tokenizer, prompt))
        self._arguments = ""

    def push(self, text: str) -> list[Part]:
        return self._parts(self._channels.split(text))

    def finish(self) -> list[Part]:
        return self._parts(self._channels.finish())

    def _parts(self, pieces: list[tuple[str, str, str]]) -> list[Part]:
        parts: list[Part] = []
        for kind, name, text in pieces:
            if kind == "call":
                self._arguments += text
            elif kind == "called":
                self._end_call(name, parts)
            else:
                _add(parts, (Reasoning if kind == "reasoning" else Said)(text))
        return parts

    def _end_call(self, name: str, parts: list[Part]) -> None:
        arguments, self._arguments = self._arguments, ""
        try:
            made = _call({"name": name, "arguments": arguments or "{}"})
            self._check_known([made])
        except ValueError as error:
            log.warning(self._warning(error), request=self._request_id)
            _add(parts, Said(f"{call_header(name)}{arguments}"))
            return
        parts.append(made)
        self.calls += 1


def _add(parts: list[Part], part: Said | Reasoning) -> None:
    """Append text, to the last part if it is of the same kind."""
    last = parts[-1] if parts else None
    if isinstance(last, Said | Reasoning) and type(last) is type(part):
        parts[-1] = type(part)(last.text + part.text)
    else:
        parts.append(part)


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
