"""Grammars of exactly one tool call, in the form that each family's models write and mlx-lm's parsers read.

In llguidance's Lark. A string argument that a family writes bare is any text without its closing mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.coordinator.api.harmony import call_header, speaks_harmony

__all__ = ["call_grammar"]

Function = dict[str, Any]  # name, parameters: OpenAI's


def call_grammar(tokenizer: TokenizerWrapper, functions: list[Function]) -> str | None:
    """The grammar of one call of one of `functions`; None where the model's form of calls has none here."""
    parser = tokenizer.tool_parser
    form = "" if parser is None else parser.__module__.rpartition(".")[2]
    if speaks_harmony(tokenizer):
        form = "harmony"
    make = _FORMS.get(form)
    return None if make is None else _Grammar(tokenizer).of([make(tokenizer, function) for function in functions])


_COMPACT = {"x-guidance": {"whitespace_flexible": False, "lenient": False}}
_SHARED = ("$defs", "definitions")  # what references point into


class _Json:
    """JSON of a schema, written as compactly as `json.dumps` does."""

    def __init__(self, schema: Function) -> None:
        self.schema = schema


class _Text:
    """Any text up to its first `end`, and that."""

    def __init__(self, end: str) -> None:
        self.end = end


class _Optional:
    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


class _OneOf:
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts


Part = str | _Json | _Text | _Optional | _OneOf


class _Grammar:
    """Writes Lark: literal text becomes text, marks that the vocabulary has as tokens become these tokens."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._marks = {text: int(i) for text, i in tokenizer.get_added_vocab().items() if text}
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._rules: list[str] = []

    def of(self, calls: list[list[Part]]) -> str:
        start = " | ".join(self._sequence(call) for call in calls)
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _sequence(self, parts: list[Part]) -> str:
        return " ".join(self._part(part) for part in parts)

    def _part(self, part: Part) -> str:
        if isinstance(part, str):
            return self._literal(part)
        if isinstance(part, _OneOf):
            return "(" + " | ".join(self._literal(text) for text in part.texts) + ")"
        if isinstance(part, _Optional):
            return f"({self._sequence(part.parts)})?"
        number = len(self._rules)
        if isinstance(part, _Json):
            self._rules.append(f"value{number}: %json {json.dumps(_COMPACT | part.schema)}")
            return f"value{number}"
        if part.end in self._marks:
            self._rules.append(f"text{number}: /(?s:.*)/ <[{self._marks[part.end]}]>")
        else:
            self._rules.append(f"text{number}[lazy]: /(?s:.*){_escaped(part.end)}/")
        return f"text{number}"

    def _literal(self, text: str) -> str:
        pieces = [text] if self._pattern is None else self._pattern.split(text)
        written = [
            f"<[{self._marks[p]}]>" if p in self._marks else json.dumps(p, ensure_ascii=False) for p in pieces if p
        ]
        return " ".join(written) or '""'


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _as_json(tokenizer: TokenizerWrapper, function: Function) -> list[Part]:
    call = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": function["parameters"]},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    } | _shared(function)
    return [f"{tokenizer.tool_call_start}\n", _Json(call), f"\n{tokenizer.tool_call_end}"]


def _mistral(tokenizer: TokenizerWrapper, function: Function) -> list[Part]:
    if "[ARGS]" in tokenizer.get_vocab():
        return [f"[TOOL_CALLS]{function['name']}[ARGS]", _object(function)]
    _, call, _ = _as_json(tokenizer, function)
    assert isinstance(call, _Json)
    one = {"type": "array", "prefixItems": [call.schema], "minItems": 1, "maxItems": 1}
    return ["[TOOL_CALLS]", _Json(one | _shared(function))]


def _kimi(_tokenizer: TokenizerWrapper, function: Function) -> list[Part]:
    begin = f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{function['name']}:0"
    end = "<|tool_call_end|><|tool_calls_section_end|>"
    return [f"{begin}<|tool_call_argument_begin|>", _object(function), end]


def _harmony(_tokenizer: TokenizerWrapper, function: Function) -> list[Part]:
    return [call_header(function["name"]), _object(function)]


def _qwen_coder(_tokenizer: TokenizerWrapper, function: Function) -> list[Part]:
    begin, end = f"<tool_call>\n<function={function['name']}>\n", "</function>\n</tool_call>"
    return [begin, *_arguments(function, "<parameter={}>\n", "\n</parameter>", "\n"), end]


def _glm(_tokenizer: TokenizerWrapper, function: Function) -> list[Part]:
    key = "<arg_key>{}</arg_key>\n<arg_value>"
    return [f"<tool_call>{function['name']}\n", *_arguments(function, key, "</arg_value>", "\n"), "</tool_call>"]


def _minimax(_tokenizer: TokenizerWrapper, function: Function) -> list[Part]:
    begin = f'<minimax:tool_call>\n<invoke name="{function["name"]}">\n'
    arguments = _arguments(function, '<parameter name="{}">', "</parameter>", "\n")
    return [begin, *arguments, "</invoke>\n</minimax:tool_call>"]


def _shared(function: Function) -> Function:
    return {name: function["parameters"][name] for name in _SHARED if name in function["parameters"]}


def _object(function: Function) -> _Json:
    return _Json({"type": "object"} | function["parameters"])


def _arguments(function: Function, key: str, close: str, after: str) -> list[Part]:
    """Each property after the other, those that are not required or not."""
    parameters = function["parameters"]
    parts: list[Part] = []
    for name, schema in (parameters.get("properties") or {}).items():
        value = _value(schema, _shared(function), close.strip())
        written: list[Part] = [key.format(name), value, after if isinstance(value, _Text) else f"{close}{after}"]
        parts.extend(written if name in (parameters.get("required") or []) else [_Optional(written)])
    return parts


def _value(schema: Any, shared: dict[str, Any], close: str) -> Part:
    if not isinstance(schema, dict):
        return _Json(shared)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) and choice for choice in choices):
        return _OneOf(choices)
    return _Text(close) if schema.get("type") == "string" else _Json(schema | shared)


_FORMS: dict[str, Callable[[TokenizerWrapper, Function], list[Part]]] = {
    "json_tools": _as_json,
    "mistral": _mistral,
    "kimi_k2": _kimi,
    "qwen3_coder": _qwen_coder,
    "glm47": _glm,
    "harmony": _harmony,
    "longcat": _as_json,
    "minimax_m2": _minimax,
}
