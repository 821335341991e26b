"""`GET /health`, `/ready` and `/v1/models`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from titan.coordinator.api.openapi import answers
from titan.coordinator.api.service import Service
from titan.coordinator.generation import ServedModel

__all__ = ["status_router"]


def status_router(service: Service) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive and its event loop turns; says nothing of the model."""
        return {"status": "ok"}

    @router.get("/ready", responses={503: {"description": "Not ready; says what is missing."}})
    async def ready() -> JSONResponse:
        """200 when a request would be answered, else 503 with what is missing."""
        engine = service.engine.status()
        placement = service.readiness()
        is_ready = engine.state == "ready" and placement.ready
        phase = engine.phase if engine.state != "ready" else placement.phase
        body = {
            "ready": is_ready,
            "state": engine.state if engine.state != "ready" or placement.ready else "installing",
            "phase": phase,
            "running": engine.running,
            "queued": engine.queued,
        }
        return JSONResponse(body, 200 if is_ready else 503, {"Cache-Control": "no-store"})

    @router.get("/v1/models", responses=answers())
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service.engine.served(), started)]}

    @router.get("/v1/models/{name:path}", responses=answers())
    async def model(name: str) -> dict[str, Any]:
        return _model(service.served(name), started)

    return router


def _model(served: ServedModel, created: int) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": created,
        "owned_by": "titan",
        "context_length": served.context_tokens,
    }
