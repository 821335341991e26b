"""The body of OpenAI's `/v1/responses`, checked, as a turn of a conversation. Knows no model."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from titan.coordinator.api.forms import AnswerForm, read_format
from titan.coordinator.api.messages import MAX_MESSAGES, ROLES, Message, read_text
from titan.coordinator.api.tools import ToolChoice, Tools, checked_names, function_tool, problem, read_choice
from titan.coordinator.api.turn import Turn
from titan.coordinator.generation import Sampling

__all__ = ["ResponsesRequest"]

Object = dict[str, Any]  # in the OpenAPI page; the validators say more
Objects = list[Object]
_TEXT_PARTS = ("input_text", "output_text", "text")


def _input(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise problem("", "should be a string or a list of at least one item")
    if len(value) > MAX_MESSAGES:
        raise problem("", f"has {len(value)} items, at most {MAX_MESSAGES} are allowed")
    messages: list[Message] = []
    for i, item in enumerate(value):
        _item(item, f"[{i}]", messages)
    if not messages:
        raise problem("", "has no message")
    return tuple(messages)


def _item(item: Any, where: str, messages: list[Message]) -> None:
    if not isinstance(item, dict):
        raise problem(where, "should be an object")
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES or role == "tool":
            raise problem(f"{where}.role", "should be system, developer, user or assistant")
        text = read_text(item.get("content"), f"{where}.content", _TEXT_PARTS)
        messages.append({"role": ROLES[role], "content": text})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(_call(item, where))
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise problem(f"{where}.call_id", "should be the id of the call that this answers")
        text = read_text(item.get("output"), f"{where}.output", _TEXT_PARTS)
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    elif kind != "reasoning":
        raise problem(f"{where}.type", f"is {str(kind)[:40]!r}, which is not supported")


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(item.get("name"), str) or not isinstance(item.get("call_id"), str):
        raise problem(where, "should have a name and a call_id")
    try:
        arguments = json.loads(item.get("arguments") or "{}")
    except (ValueError, TypeError):
        arguments = None
    if not isinstance(arguments, dict):
        raise problem(f"{where}.arguments", "should be a JSON object as a string")
    return {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": arguments}}


def _tools(value: Any) -> Tools:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > 128:
        raise problem("", "should be a list of at most 128 tools")
    for i, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise problem(f"[{i}].type", 'should be "function"; tools of OpenAI\'s servers are not here')
    return checked_names([function_tool(tool, f"[{i}]", "parameters") for i, tool in enumerate(value)])


def _text(value: Any) -> AnswerForm:
    if value is None:
        return AnswerForm()
    if not isinstance(value, dict) or set(value) - {"format", "verbosity"}:
        raise problem("", "should be an object with a format")
    return read_format(value.get("format"), None)


Choice = Annotated[ToolChoice, PlainValidator(read_choice, json_schema_input_type=str | Object | None)]


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = None
    input: Annotated[tuple[Message, ...], PlainValidator(_input, json_schema_input_type=str | Objects)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    text: Annotated[AnswerForm, PlainValidator(_text, json_schema_input_type=Object | None)] = AnswerForm()
    tools: Annotated[Tools, PlainValidator(_tools, json_schema_input_type=Objects | None)] = ()
    tool_choice: Annotated[ToolChoice, PlainValidator(read_choice, json_schema_input_type=str | Object | None)] = (
        ToolChoice()
    )
    metadata: dict[str, str] | None = None

    @property
    def turn(self) -> Turn:
        system: tuple[Message, ...] = ()
        if self.instructions:
            system = ({"role": "system", "content": self.instructions},)
        return Turn(
            messages=system + self.input,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
            ),
            max_tokens=self.max_output_tokens,
            tools=self.tools,
            choice=self.tool_choice,
            form=self.text,
            messages_param="input",
            form_param="text",
        )
