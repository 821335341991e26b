"""Tools of a request: checked, brought to OpenAI's form, and how a call is made certain where it has to be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from titan.common.errors import InvalidRequest
from titan.coordinator.api.call_grammars import call_grammar
from titan.coordinator.generation import ServedModel

__all__ = ["ToolChoice", "Tools", "forced_call", "read_choice", "read_tools"]

MAX_TOOLS = 128
MAX_SCHEMA_CHARACTERS = 256 << 10
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Tools = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`kind` is "auto", "none" or "required"; with a name, only that tool."""

    kind: str = "auto"
    name: str | None = None


def read_tools(value: Any) -> Tools:
    """OpenAI's `tools` of a chat: a list of {"type": "function", "function": {"name", "description", "parameters"}}."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise problem("", "should be a list")
    if len(value) > MAX_TOOLS:
        raise problem("", f"has {len(value)} tools, at most {MAX_TOOLS} are allowed")
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise problem(f"[{i}].type", 'should be "function"')
        tools.append(function_tool(tool.get("function"), f"[{i}].function", "parameters"))
    return checked_names(tools)


def function_tool(value: Any, where: str, schema_key: str) -> dict[str, Any]:
    """One function in OpenAI's form, from an object that has its schema under `schema_key`."""
    if not isinstance(value, dict):
        raise problem(where, "should be an object with a name")
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise problem(f"{where}.name", "should be 1 to 128 letters, digits, dots, colons, dashes or underscores")
    description = value.get("description")
    if description is not None and not isinstance(description, str):
        raise problem(f"{where}.description", "should be a string")
    parameters = value.get(schema_key)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise problem(f"{where}.{schema_key}", "should be a JSON schema, an object")
    if len(json.dumps(parameters)) > MAX_SCHEMA_CHARACTERS:
        raise problem(f"{where}.{schema_key}", f"is longer than {MAX_SCHEMA_CHARACTERS} characters")
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def checked_names(tools: list[dict[str, Any]]) -> Tools:
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise problem("", "has two tools of one name")
    return tuple(tools)


def read_choice(value: Any) -> ToolChoice:
    """OpenAI's `tool_choice`."""
    if value is None:
        return ToolChoice()
    if value in ("auto", "none", "required"):
        return ToolChoice(value)
    if isinstance(value, Mapping) and value.get("type") == "function":
        function = value.get("function", value)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return ToolChoice("required", function["name"])
    raise problem("", 'should be "auto", "none", "required" or {"type": "function", "function": {"name": …}}')


def forced_call(served: ServedModel, tools: Tools, choice: ToolChoice) -> str:
    """The grammar of exactly one call of one of the allowed tools.

    Raises:
        InvalidRequest: no such tool, or the model writes its calls in a form that has no grammar here.
    """
    allowed = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not allowed:
        raise InvalidRequest(
            f"tool_choice asks for {choice.name or 'a tool'!r}, which is not among the tools",
            "name one of them",
            param="tool_choice",
        )
    grammar = call_grammar(served.tokenizer, [tool["function"] for tool in allowed])
    if grammar is None:
        raise InvalidRequest(
            f"a call cannot be made certain with {served.name}: the form in which it writes calls has no grammar here",
            'use tool_choice "auto"',
            param="tool_choice",
        )
    return grammar


def problem(where: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError("tools", "{where} {reason}", {"where": where, "reason": reason})
