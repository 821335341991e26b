"""The body of Anthropic's `/v1/messages`, checked, as a turn of a conversation. Knows no model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from titan.coordinator.api.messages import MAX_MESSAGES, Message, read_text
from titan.coordinator.api.tools import ToolChoice, Tools, checked_names, function_tool, problem
from titan.coordinator.api.turn import Turn
from titan.coordinator.generation import Sampling

__all__ = ["MessagesRequest"]

MAX_STOPS = 16
Object = dict[str, Any]  # in the OpenAPI page; the validators say more
Objects = list[Object]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "required"}


def _system(value: Any) -> str:
    return "" if value is None else read_text(value, "")


def _tools(value: Any) -> Tools:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > 128:
        raise problem("", "should be a list of at most 128 tools")
    for i, tool in enumerate(value):
        if isinstance(tool, dict) and tool.get("type", "custom") != "custom":
            raise problem(f"[{i}].type", "is a tool of Anthropic's servers, only custom tools are supported")
    return checked_names([function_tool(tool, f"[{i}]", "input_schema") for i, tool in enumerate(value)])


def _choice(value: Any) -> ToolChoice:
    if value is None:
        return ToolChoice()
    if not isinstance(value, dict) or value.get("type") not in _CHOICES:
        raise problem(".type", "should be auto, any, tool or none")
    name = value.get("name") if value["type"] == "tool" else None
    if value["type"] == "tool" and not isinstance(name, str):
        raise problem(".name", "should name a tool")
    return ToolChoice(_CHOICES[value["type"]], name)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise problem("", "should be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise problem("", f"has {len(value)} messages, at most {MAX_MESSAGES} are allowed")
    return tuple(message for i, item in enumerate(value) for message in _message(item, f"[{i}]"))


def _message(value: Any, where: str) -> list[Message]:
    """One message; its tool results become messages of their own, before its text."""
    if not isinstance(value, dict) or value.get("role") not in ("user", "assistant"):
        raise problem(f"{where}.role", "should be user or assistant")
    role, content = value["role"], value.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise problem(f"{where}.content", "should be a string or a list of blocks")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(read_text([block], at))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, at))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, at))
        elif kind not in ("thinking", "redacted_thinking"):
            raise problem(at, f"is of type {str(kind)[:40]!r}, which is not supported in a message of the {role}")
    if not texts and not calls and results:
        return results
    message: Message = {"role": role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("id"), str) or not isinstance(block.get("name"), str):
        raise problem(where, "should have an id and a name")
    if not isinstance(block.get("input"), dict):
        raise problem(f"{where}.input", "should be an object")
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block["input"]}}


def _result(block: dict[str, Any], where: str) -> Message:
    if not isinstance(block.get("tool_use_id"), str):
        raise problem(f"{where}.tool_use_id", "should be the id of the call that this answers")
    content = block.get("content")
    text = "" if content is None else read_text(content, f"{where}.content")
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


class MessagesRequest(BaseModel):
    """What `/v1/messages` and `/v1/messages/count_tokens` take."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str
    messages: Annotated[tuple[Message, ...], PlainValidator(_messages, json_schema_input_type=Objects)]
    system: Annotated[str, PlainValidator(_system, json_schema_input_type=str | Objects | None)] = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    tools: Annotated[Tools, PlainValidator(_tools, json_schema_input_type=Objects | None)] = ()
    tool_choice: Annotated[ToolChoice, PlainValidator(_choice, json_schema_input_type=Object | None)] = ToolChoice()
    thinking: dict[str, str | int] | None = None

    @property
    def turn(self) -> Turn:
        system: tuple[Message, ...] = ({"role": "system", "content": self.system},) if self.system else ()
        thinking = None if self.thinking is None else self.thinking.get("type") in ("enabled", "adaptive")
        return Turn(
            messages=system + self.messages,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k or 0,
            ),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            tools=self.tools,
            choice=self.tool_choice,
            template_values={} if thinking is None else {"enable_thinking": thinking},
        )
