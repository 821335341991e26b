"""New keys for a session that lasts: another channel and another lane take the place of the old ones, between calls.

TLS 1.3 keys are good for a limited number of records (RFC 8446, 5.5), and neither Python's ssl nor gRPC can update them
on an open connection. A certificate that was renewed is used from here on too. Knows no thread; the keeper calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from titan.common.config.hosts import Timeouts
from titan.common.security.channel import open_channel
from titan.common.security.credentials import Credentials
from titan.common.security.revocation import require_not_revoked
from titan.common.security.tls import client_ssl_context
from titan.coordinator.remote.connection import CHANNEL_OPTIONS, Connection, from_rpc_error
from titan.coordinator.remote.grpc_transport import GrpcTransport
from titan.coordinator.remote.lane_transport import open_lane
from titan.coordinator.remote.transport import Transport
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1.worker_pb2_grpc import WorkerStub

RENEW_RECORDS = 1 << 23  # a third of what AES-GCM allows (2^24.5)
RENEW_AFTER_S = 12 * 3600.0
RETIRE_S = 60.0


def due(connection: Connection, transport: Transport | None, credentials: Credentials) -> bool:
    """Whether the keys have been used enough, or `credentials` are newer than the connection's."""
    if connection.credentials is not credentials or time.monotonic() - connection.opened_s > RENEW_AFTER_S:
        return True
    return transport is not None and transport.records >= RENEW_RECORDS


def reopen(
    old: Connection,
    transport: Transport | None,
    credentials: Credentials,
    timeouts: Timeouts,
    dtype: str,
    address: str | None = None,
) -> tuple[Connection, Transport | None]:
    """Another channel to the same worker for the same session, and another transport of the kind that is in use.

    Args:
        address: of the worker's, another one than the session is reached at now.

    Raises:
        ClusterError, SecurityError: the worker does not answer, refuses, or is another one now; nothing is left open.
    """
    name, session, address = old.worker.name, old.hello.session, address or old.address
    checked = open_channel(name, address, credentials, timeout_s=timeouts.connect, options=CHANNEL_OPTIONS)
    try:
        require_not_revoked(checked.peer, old.revocations.current)
        stub = WorkerStub(checked.channel)
        reply = stub.OpenLane(pb.OpenLaneRequest(session=session), timeout=timeouts.hello)
        hello = pb.HelloReply()
        hello.CopyFrom(old.hello)
        hello.lane_port, hello.lane_token = reply.lane_port, reply.lane_token
        fresh = Connection(old.worker, address, checked, old.revocations, hello, credentials)
        if transport is None:
            return fresh, None
        if transport.name == "grpc":
            return fresh, GrpcTransport(fresh.stub, session, name, dtype)
        timeout_s = timeouts.connect + timeouts.hello
        return fresh, open_lane(address, hello, client_ssl_context(credentials), name, dtype, timeout_s)
    except grpc.RpcError as error:
        checked.channel.close()
        raise from_rpc_error(error, name, "OpenLane") from error
    except BaseException:
        checked.channel.close()
        raise


def retire(transport: Transport, quiet_s: float, wait: Callable[[float], bool]) -> None:
    """Close a transport that nobody is given any more, once what was sent over it has been answered.

    Args:
        quiet_s: so long somebody may still be about to send.
        wait: sleeps for so many seconds; True when there is no time to wait any longer.
    """
    deadline = time.monotonic() + quiet_s + RETIRE_S
    hurried = wait(quiet_s)
    while not hurried and transport.outstanding > 0 and time.monotonic() < deadline:
        hurried = wait(0.02)
    transport.close()
