"""The OpenAPI page: the bodies that `schemas` check and the answers that `errors` give, said for machines."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from titan import __version__

__all__ = ["answers", "describe", "takes"]

_ERROR = {"$ref": "#/components/schemas/Error"}
_ANTHROPIC_ERROR = {"$ref": "#/components/schemas/AnthropicError"}
_STATUSES = {
    400: "The request cannot be answered as it is.",
    401: "No key, or not one of this coordinator's.",
    403: "A Host or Origin, or a key, that may not do this.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "The queue is full, or the key has asked too often; Retry-After says when to come back.",
    500: "The coordinator failed on this request.",
    503: "The model is not ready.",
}
_SCHEMAS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}
_MODELS: list[type[BaseModel]] = []


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of an endpoint whose JSON body is a `model`."""
    if model not in _MODELS:
        _MODELS.append(model)
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(*, streams: bool = False, anthropic: bool = False) -> dict[int | str, dict[str, Any]]:
    """`responses` of an endpoint: every error in its shape, and whether the answer can be a stream of events."""
    error = _ANTHROPIC_ERROR if anthropic else _ERROR
    found: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": {"application/json": {"schema": error}}}
        for status, text in _STATUSES.items()
    }
    if streams:
        found[200] = {"content": {"text/event-stream": {}}}
    return found


def describe(app: FastAPI) -> None:
    """Give `app` its page."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = get_openapi(title=app.title, version=__version__, routes=app.routes)
            components = page.setdefault("components", {}).setdefault("schemas", {})
            components.clear()
            components.update(_SCHEMAS)
            for model in _MODELS:
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                components.update(schema.pop("$defs", {}))
                components[model.__name__] = schema
            for path in page["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # nothing here answers so
            app.openapi_schema = page
        return app.openapi_schema

    app.openapi = openapi
