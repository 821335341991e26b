"""The messages of a chat request, checked and brought to what chat templates read: role and text."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

__all__ = ["Message", "read_messages"]

Message = dict[str, str]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Clients send an assistant's message back as they got it; these parts of it are no input.
_ECHOED = frozenset({"annotations", "reasoning", "reasoning_content", "refusal", "name"})


def read_messages(value: Any) -> tuple[Message, ...]:
    """A list of messages as {"role", "content"} with the text of all parts joined.

    Raises:
        PydanticCustomError: not a list of one or more messages, an unknown role, content that is not text.
    """
    if not isinstance(value, list) or not value:
        raise _problem("", "should be a list of at least one message")
    return tuple(_message(message, f"[{i}]") for i, message in enumerate(value))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise _problem(where, "should be an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _problem(f"{where}.role", f"should be one of {', '.join(ROLES)}")
    for name, other in value.items():
        if name not in ("role", "content") and name not in _ECHOED and other not in (None, [], {}):
            raise _problem(f"{where}.{name[:80]}", "is not supported")
    if "content" not in value:
        raise _problem(f"{where}.content", "is missing")
    return {"role": ROLES[role], "content": _text(value["content"], f"{where}.content")}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _problem(where, "should be a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _problem(f"{where}[{i}]", "should be an object with a type")
        if part["type"] != "text":
            raise _problem(f"{where}[{i}]", f"is of type {part['type'][:40]!r}, only text is supported")
        if not isinstance(part.get("text"), str):
            raise _problem(f"{where}[{i}].text", "should be a string")
        texts.append(part["text"])
    return "".join(texts)


def _problem(where: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError("messages", "{where} {reason}", {"where": where, "reason": reason})
