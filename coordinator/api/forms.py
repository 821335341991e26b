"""What form an answer has to have, as requests say it: any text, a JSON object, JSON of a schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from titan.common.errors import InvalidRequest
from titan.coordinator.generation.grammar import json_grammar

__all__ = ["AnswerForm", "read_format", "read_response_format"]

MAX_SCHEMA_CHARACTERS = 256 << 10


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The grammar of the answer; None for any text."""

    grammar: str | None = None


def read_response_format(value: Any) -> AnswerForm:
    """OpenAI's `response_format` of a chat."""
    return read_format(value, "json_schema")


def read_format(value: Any, schema_holder: str | None) -> AnswerForm:
    """{"type": "text" | "json_object" | "json_schema"}.

    Args:
        schema_holder: the key of the object that has the `schema`; None when it stands in `value` itself.
    """
    if value is None:
        return AnswerForm()
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return AnswerForm()
    if kind == "json_object":
        return AnswerForm(json_grammar({"type": "object"}))
    if kind != "json_schema":
        raise _problem(".type", "should be text, json_object or json_schema")
    holder = value if schema_holder is None else value.get(schema_holder)
    where = "" if schema_holder is None else f".{schema_holder}"
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise _problem(f"{where}.schema", "should be a JSON schema, an object")
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
        raise _problem(f"{where}.schema", f"is longer than {MAX_SCHEMA_CHARACTERS} characters")
    try:
        return AnswerForm(json_grammar(schema))
    except InvalidRequest as error:
        raise _problem(f"{where}.schema", error.cause) from None


def _problem(where: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError("format", "{where} {reason}", {"where": where, "reason": reason})
