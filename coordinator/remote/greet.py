"""Opening a session with one worker: Hello over the first of its addresses that answers.

Every wait has a deadline. Knows the step, not when to take it again.
"""

from __future__ import annotations

import grpc

from titan.common.config.hosts import Timeouts, Worker
from titan.common.errors import (
    ClusterError,
    SecurityError,
    WorkerBadReply,
    WorkerRefused,
    WorkerTimeout,
    WorkerUnreachable,
)
from titan.common.registry.shape import ModelShape
from titan.common.security.channel import open_channel, sync_revocations
from titan.common.security.credentials import Credentials
from titan.common.security.revocation import Revocations, require_not_revoked
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.common.wire.messages import PROTOCOL_VERSION
from titan.coordinator.remote.connection import CHANNEL_OPTIONS, Connection, from_rpc_error
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1.worker_pb2_grpc import WorkerStub


def greet(
    worker: Worker,
    credentials: Credentials,
    timeouts: Timeouts,
    shape: ModelShape,
    dtype: str,
    instance_id: str,
    *,
    reduced: bool = False,
) -> Connection:
    """Say Hello to a worker, at its addresses in turn, after both sides have the newest list of revoked certificates.

    Args:
        reduced: requests of the session will carry scores.

    Raises:
        WorkerUnreachable: no address answered as this worker; the sentence says why for each.
        WorkerRefused, SecurityError: an address answered and one side refused.
    """
    request = pb.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        software_version=SOFTWARE_VERSION,
        mlx_version=MLX_VERSION,
        instance_id=instance_id,
        model_shape=shape.to_json(),
        compute_dtype=dtype,
        reduced=reduced,
    )
    reasons = []
    revocations = Revocations(credentials.ca_path, credentials.ca_pem)
    for address in worker.addresses:
        try:
            checked = open_channel(
                worker.name, address, credentials, timeout_s=timeouts.connect, options=CHANNEL_OPTIONS
            )
        except ClusterError as error:
            reasons.append(error.cause)
            continue
        channel = checked.channel
        try:
            sync_revocations(checked, revocations, timeout_s=timeouts.connect + timeouts.probe)
            require_not_revoked(checked.peer, revocations.current)
            require_not_revoked(credentials.identity, revocations.current)
            reply = WorkerStub(channel).Hello(request, timeout=timeouts.hello)
            _check_hello(worker, reply, reduced)
        except grpc.RpcError as error:
            channel.close()
            refusal = from_rpc_error(error, worker.name, "Hello")
            if isinstance(refusal, (WorkerRefused, SecurityError)):
                raise refusal from error
            reasons.append(f"{address}: {refusal.cause}")
        except (WorkerUnreachable, WorkerTimeout) as error:
            channel.close()
            reasons.append(f"{address}: {error.cause}")
        except BaseException:
            channel.close()
            raise
        else:
            return Connection(worker, address, checked, revocations, reply, credentials)
    raise WorkerUnreachable(
        f"worker {worker.name} cannot be reached: {'; '.join(reasons)}",
        "start titan-worker there and check with `titan hosts check`",
    )


def _check_hello(worker: Worker, reply: pb.HelloReply, reduced: bool) -> None:
    if reply.protocol_version != PROTOCOL_VERSION:
        raise WorkerRefused(
            f"worker {worker.name} speaks protocol {reply.protocol_version} (Titan {reply.software_version[:32]}), "
            f"this coordinator speaks {PROTOCOL_VERSION} (Titan {SOFTWARE_VERSION})",
            "install the same version of titan-moe on both",
        )
    if reduced and not reply.reduced:
        raise WorkerRefused(
            f"worker {worker.name} (Titan {reply.software_version[:32]}) does not know wire precision `reduced`",
            "install the same version of titan-moe on both, or set `precision: exact`",
        )
    if not reply.session.id or len(reply.session.id) > 64 or not 0 < len(reply.worker_id) <= 64:
        raise WorkerBadReply(f"worker {worker.name} answered Hello without a session")
