"""A prober that goes on where TLS has succeeded: it asks the worker for its Status. Knows that one message."""

from __future__ import annotations

import time
from dataclasses import replace

import grpc

from titan.common.config.hosts import Worker
from titan.common.config.probe import Prober, ProbeResult, probe_tls
from titan.common.errors import TitanError
from titan.common.security.channel import open_channel, trust_error
from titan.common.security.credentials import Credentials
from titan.common.units import format_bytes
from titan.common.versions import SOFTWARE_VERSION
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1.worker_pb2_grpc import WorkerStub

MAX_SHOWN_CHARS = 64


def status_prober(connect_s: float, status_s: float) -> Prober:
    """A prober that takes at most `connect_s` for each of two connections and `status_s` for the answer."""

    def probe(worker: Worker, address: str, credentials: Credentials) -> ProbeResult:
        return probe_status(worker, address, credentials, connect_s=connect_s, status_s=status_s)

    return probe


def probe_status(
    worker: Worker, address: str, credentials: Credentials, *, connect_s: float, status_s: float
) -> ProbeResult:
    """As `probe_tls`, and with the worker's version, state and memory in `details`. Raises nothing for a peer."""
    start = time.monotonic()
    result = probe_tls(worker, address, credentials, timeout_s=connect_s)
    if not result.ok:
        return result
    try:
        reply = ask_status(worker.name, address, credentials, connect_s=connect_s, status_s=status_s)
    except TitanError as error:
        seconds = time.monotonic() - start
        return replace(result, status="status_failed", cause=error.cause, mend=error.mend, seconds=seconds)
    return replace(result, details=describe_status(reply))


def ask_status(
    name: str, address: str, credentials: Credentials, *, connect_s: float, status_s: float
) -> pb.StatusReply:
    """Status of the worker called `name`.

    Raises:
        ClusterError, SecurityError: as `open_channel`, or no answer in time.
    """
    with open_channel(name, address, credentials, timeout_s=connect_s) as channel:
        try:
            return WorkerStub(channel.channel).Status(pb.StatusRequest(), timeout=status_s)
        except grpc.RpcError as error:
            raise trust_error(error, channel.peer, "Status") from error


def describe_status(reply: pb.StatusReply) -> dict[str, str]:
    """What people want to know of it; a peer's words are cut."""
    version = reply.software_version[:MAX_SHOWN_CHARS]
    if version != SOFTWARE_VERSION:
        version += f" (this machine has {SOFTWARE_VERSION})"
    memory = f"{format_bytes(reply.expert_bytes)} of {format_bytes(reply.memory_budget_bytes)} used"
    holds = f"{reply.experts} experts of model {reply.fingerprint[:12]}" if reply.fingerprint else "no model yet"
    return {"version": version, "state": reply.state[:MAX_SHOWN_CHARS], "memory": memory, "holds": holds}
