"""Probe: what a worker says of its own compute time and power. Knows no transport but gRPC."""

from __future__ import annotations

import grpc

from titan.common.errors import WorkerBadReply
from titan.coordinator.remote.connection import Connection, from_rpc_error
from titan.proto.titan.v1 import worker_pb2 as pb

POWER_S = 10.0  # measuring power takes about one second, and up to five where a tool is asked
MAX_POWER_W = 1e5


def probe_pair_s(connection: Connection, layer: int, top_k: int, timeout_s: float) -> float:
    """Measured seconds a (row, expert) pair on this worker: median of five calls of one row."""
    request = pb.ProbeRequest(session=connection.hello.session, layer=layer, rows=1, pairs_a_row=top_k, repeats=5)
    try:
        reply = connection.stub.Probe(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise from_rpc_error(error, connection.worker.name, "Probe") from error
    times = sorted(reply.compute_us)
    if not times:
        raise WorkerBadReply(f"worker {connection.worker.name} answered Probe without figures")
    return times[len(times) // 2] / 1e6 / top_k


def probe_power_w(connection: Connection, layer: int, top_k: int, timeout_s: float) -> float | None:
    """Package power of this worker while it computes (P_n), in watts; None where its system does not tell."""
    request = pb.ProbeRequest(
        session=connection.hello.session, layer=layer, rows=1, pairs_a_row=top_k, repeats=1, power=True
    )
    try:
        reply = connection.stub.Probe(request, timeout=timeout_s + POWER_S)
    except grpc.RpcError as error:
        raise from_rpc_error(error, connection.worker.name, "Probe") from error
    known = reply.HasField("power_w") and 0 <= reply.power_w <= MAX_POWER_W  # not NaN either
    return reply.power_w if known else None
