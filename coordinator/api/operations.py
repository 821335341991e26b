"""What operators ask of a coordinator: `/metrics`, `/v1/titan/cluster`, `/v1/titan/stats`, `/v1/titan/replan`,
`/v1/titan/drain`, `/v1/titan/resume`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from titan.common.errors import Forbidden
from titan.common.metrics import CONTENT_TYPE
from titan.coordinator.api.openapi import answers
from titan.coordinator.api.service import Service

__all__ = ["Operations", "operations_router"]


@dataclass(frozen=True, slots=True)
class Operations:
    """What the server can tell and do beyond requests.

    Args:
        metrics: the text for Prometheus.
        cluster: plan, nodes, health, counters, as JSON values.
        stats: what the SSD tier does, layer by layer, as JSON values.
        replan: plan again from figures as they are now, and move experts if that pays; says what came of it.
    """

    metrics: Callable[[], bytes] = bytes
    cluster: Callable[[], dict[str, Any]] = dict
    replan: Callable[[], dict[str, Any]] = dict
    stats: Callable[[], dict[str, Any]] = dict


def operations_router(service: Service, operations: Operations) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse, responses=answers())
    def metrics() -> Response:
        return Response(operations.metrics(), media_type=CONTENT_TYPE)

    @router.get("/v1/titan/cluster", responses=answers())
    def cluster() -> dict[str, Any]:
        """What the cluster is and does."""
        return {"engine": _engine(service)} | operations.cluster()

    @router.get("/v1/titan/stats", responses=answers())
    def stats() -> dict[str, Any]:
        """Hit rates, loads, stalls and prefetch of every layer, the disk, the workers' caches."""
        return operations.stats()

    @router.post("/v1/titan/replan", responses=answers())
    def replan(request: Request) -> dict[str, Any]:
        """Plan again and move experts if that promises enough; requests go on meanwhile."""
        require_operator(request)
        return operations.replan()

    @router.post("/v1/titan/drain", responses=answers())
    async def drain(request: Request) -> dict[str, Any]:
        """Take no new requests; those under way are finished."""
        require_operator(request)
        service.engine.drain()
        return {"engine": _engine(service)}

    @router.post("/v1/titan/resume", responses=answers())
    async def resume(request: Request) -> dict[str, Any]:
        """Take requests again."""
        require_operator(request)
        service.engine.resume()
        return {"engine": _engine(service)}

    return router


def require_operator(request: Request) -> None:
    """Raise Forbidden unless the key is an operator's; where no key is asked for, who reaches loopback is one."""
    key = request.scope.get("titan.key")
    if key is not None and not key.operator:
        raise Forbidden(f"the key {key.name!r} is no operator's", "use one made with `titan keys add NAME --operator`")


def _engine(service: Service) -> dict[str, Any]:
    status = service.engine.status()
    return {
        "state": status.state,
        "phase": status.phase,
        "running": status.running,
        "decoding": status.decoding,
        "prefilling": status.prefilling,
        "set_back": status.set_back,
        "queued": status.queued,
        "kv_tokens": status.kv_tokens,
        "kv_budget_tokens": status.kv_budget_tokens,
        "completed": status.completed,
        "failed": status.failed,
        "cancelled": status.cancelled,
        "restarts": status.restarts,
    }
