"""Wires the HTTP API together. Knows no socket; `server` runs what this makes."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from titan.common.config.address import is_loopback
from titan.common.errors import ConfigError, TitanError
from titan.coordinator.api.anthropic import anthropic_router
from titan.coordinator.api.auth import ApiKeys
from titan.coordinator.api.chat import chat_router
from titan.coordinator.api.completions import completions_router
from titan.coordinator.api.errors import http_exception_response, titan_error_response
from titan.coordinator.api.gate import Gate
from titan.coordinator.api.limits import Limits
from titan.coordinator.api.openapi import describe
from titan.coordinator.api.operations import Operations, operations_router
from titan.coordinator.api.responses import responses_router
from titan.coordinator.api.service import Readiness, Service
from titan.coordinator.api.status import status_router
from titan.coordinator.generation import Engine

__all__ = ["create_app"]


def create_app(
    engine: Engine,
    *,
    api_keys: ApiKeys | None = None,
    limits: Limits | None = None,
    readiness: Callable[[], Readiness] = Readiness,
    listen_host: str = "127.0.0.1",
    operations: Operations | None = None,
) -> FastAPI:
    """The HTTP API over `engine`, which need not be ready yet.

    Args:
        api_keys: keys that open everything but /health and /ready; None asks for none.
        readiness: asked on every /ready: is all but the engine there?
        operations: what /metrics and /v1/titan/cluster tell; None for nothing.
        listen_host: the host or address the server will listen on, without port.

    Raises:
        ConfigError: `listen_host` can be reached from other machines and there is no key.
    """
    if api_keys is None and not is_loopback(listen_host):
        raise ConfigError(
            f"{listen_host} can be reached from other machines and no API key is configured",
            "name a file with a key (coordinator.api_key_file), or listen on 127.0.0.1",
        )
    service = Service(engine, limits or Limits(), readiness)
    app = FastAPI(title="Titan", openapi_url="/openapi.json", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.engine = engine
    app.include_router(status_router(service))
    app.include_router(chat_router(service))
    app.include_router(completions_router(service))
    app.include_router(responses_router(service))
    app.include_router(anthropic_router(service))
    app.include_router(operations_router(service, operations or Operations()))
    app.add_exception_handler(TitanError, titan_error_response)
    app.add_exception_handler(HTTPException, http_exception_response)
    describe(app)
    app.add_middleware(Gate, api_keys=api_keys, listen_host=listen_host)
    return app
