"""The messages of a chat request, checked and brought to what chat templates read: role, text and calls of tools."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticCustomError

__all__ = ["Message", "read_messages", "read_text"]

Message = dict[str, Any]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_MESSAGES = 4096

# Clients send an assistant's message back as they got it; these parts of it are no input.
_ECHOED = frozenset({"annotations", "reasoning", "reasoning_content", "refusal", "name", "warnings", "audio"})


def read_messages(value: Any) -> tuple[Message, ...]:
    """A list of messages as {"role", "content"}, the text of all parts joined; an assistant's may have "tool_calls",
    whose arguments are objects, and a tool's has "tool_call_id".

    Raises:
        PydanticCustomError: not a list of one or more messages, an unknown role, content that is not text.
    """
    if not isinstance(value, list) or not value:
        raise _problem("", "should be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise _problem("", f"has {len(value)} messages, at most {MAX_MESSAGES} are allowed")
    return tuple(_message(message, f"[{i}]") for i, message in enumerate(value))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise _problem(where, "should be an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _problem(f"{where}.role", f"should be one of {', '.join(ROLES)}")
    message: Message = {"role": ROLES[role]}
    calls = value.get("tool_calls") if role == "assistant" else None
    for name, other in value.items():
        known = name in ("role", "content") or name in _ECHOED
        known = known or (name == "tool_calls" and role == "assistant") or (name == "tool_call_id" and role == "tool")
        if not known and other not in (None, [], {}):
            raise _problem(f"{where}.{name[:80]}", "is not supported")
    if calls:
        message["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if role == "tool":
        if not isinstance(value.get("tool_call_id"), str):
            raise _problem(f"{where}.tool_call_id", "should be the id of the call that this answers")
        message["tool_call_id"] = value["tool_call_id"]
        if isinstance(value.get("name"), str):
            message["name"] = value["name"]
    thought = value.get("reasoning_content") or value.get("reasoning")
    if calls and isinstance(thought, str) and not value.get("content"):
        message["thinking"] = thought  # gpt-oss' template shows the model why it made the calls that are answered now
    if value.get("content") is None and calls:
        message["content"] = ""
    elif "content" not in value:
        raise _problem(f"{where}.content", "is missing")
    else:
        message["content"] = read_text(value["content"], f"{where}.content")
    return message


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _problem(where, "should be a list of calls")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(value)]


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _problem(f"{where}.function", "should be an object with name and arguments")
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise _problem(f"{where}.function.arguments", "should be JSON") from None
    if not isinstance(arguments, dict):
        raise _problem(f"{where}.function.arguments", "should be a JSON object")
    call_id = value.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise _problem(f"{where}.id", "should be a string")
    return {"id": call_id or "", "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_text(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Text, or the text of all parts joined.

    Args:
        kinds: types of parts that carry text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _problem(where, "should be a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _problem(f"{where}[{i}]", "should be an object with a type")
        if part["type"] not in kinds:
            raise _problem(f"{where}[{i}]", f"is of type {part['type'][:40]!r}, only text is supported")
        if not isinstance(part.get("text"), str):
            raise _problem(f"{where}[{i}].text", "should be a string")
        texts.append(part["text"])
    return "".join(texts)


def _problem(where: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError("messages", "{where} {reason}", {"where": where, "reason": reason})
