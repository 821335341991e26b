"""Which transport a session uses: the one that hosts.yaml names, or the faster of both, measured and logged."""

from __future__ import annotations

import statistics
import time

import numpy as np

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.errors import ClusterError
from titan.common.log import get_logger
from titan.common.registry.shape import ModelShape
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.coordinator.remote.exchange import Exchange, Outstanding
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.share import Share
from titan.coordinator.remote.transport import Transport

log = get_logger("coordinator.workers")

WARM_UP, REPEATS = 3, 9
FIRST_ID = 1 << 62  # no request of the engine has such an id


def faster(transports: list[Transport], call: ExecuteCall) -> Transport:
    """The transport with the smallest round trip beside the worker's own time; the others are closed.

    Raises:
        ClusterError: none of them brought an answer; all are closed.
    """
    times: dict[str, float] = {}
    errors: list[ClusterError] = []
    for transport in transports:
        try:
            times[transport.name] = round_trip_s(transport, call)
        except ClusterError as error:
            errors.append(error)
    best = min(transports, key=lambda transport: times.get(transport.name, float("inf")))
    for transport in transports:
        if transport is not best or not times:
            transport.close()
    if not times:
        raise errors[0]
    log.info(
        "transport measured",
        worker=best.worker,
        chosen=best.name,
        **{f"{name}_us": round(seconds * 1e6, 1) for name, seconds in times.items()},
    )
    return best


def round_trip_s(transport: Transport, call: ExecuteCall, repeats: int = REPEATS) -> float:
    """Median seconds of `call` over a transport, without what the worker says it computed.

    Raises:
        ClusterError: no answer, or not a right one.
    """
    exchange = Exchange(FIRST_ID)
    replies = ReplyTimes(call.deadline_s, 0.0)
    times: list[float] = []
    positions = np.arange(call.pair_rows.shape[0])
    for _ in range(WARM_UP + repeats):
        started = time.perf_counter()

        def take(_: Outstanding, result: ExecuteResult, started: float = started) -> None:
            times.append(time.perf_counter() - started - result.compute_us / 1e6)

        exchange.send(transport, call._replace(request_id=exchange.next_id()), positions, replies)
        failed = exchange.collect(take)
        if failed:
            raise failed[0].error
    return statistics.median(times[WARM_UP:])


def probing_call(shape: ModelShape, dtype: str, share: Share, deadline_s: float) -> ExecuteCall:
    """One row of zeros through top-k experts of the first layer that the worker has experts of."""
    layer, experts = share.example
    return ExecuteCall(
        request_id=0,
        layer=layer,
        activations=np.zeros((1, shape.hidden_size), COMPUTE_DTYPES[dtype][0]),
        pair_rows=np.zeros(min(shape.top_k, len(experts)), np.uint32),
        pair_experts=np.array(experts[: shape.top_k], np.uint32),
        sort=False,
        deadline_s=deadline_s,
    )
