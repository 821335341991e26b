"""A gRPC channel to one worker whose certificate has been checked, and what members say to each other about trust.

gRPC's Python API neither knows lists of revoked certificates nor says whom a client reached. So the certificate is
looked at over a TLS connection of its own first, and the channel is then bound to this very certificate: nobody else's
key gets through, that of an older certificate of the same name included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ssl import DER_cert_to_PEM_cert
from typing import Any

import grpc

from titan.common.config.probe import ProbeFailed, compare_name, handshake
from titan.common.errors import SecurityError, TitanError, WorkerTimeout, WorkerUnreachable
from titan.common.security.credentials import Credentials
from titan.common.security.identity import Identity
from titan.common.security.revocation import Revocations
from titan.common.security.tls import channel_options, grpc_channel_credentials
from titan.proto.titan.v1 import trust_pb2 as pb
from titan.proto.titan.v1.trust_pb2_grpc import TrustStub

MAX_MESSAGE_BYTES = 1 << 20
LIMITS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.enable_retries", 0))


@dataclass(frozen=True, slots=True)
class CheckedChannel:
    """A channel and whose it is. Close the channel."""

    channel: grpc.Channel
    peer: Identity

    def __enter__(self) -> CheckedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()


def open_channel(
    name: str,
    address: str,
    credentials: Credentials,
    *,
    timeout_s: float,
    options: Sequence[tuple[str, Any]] = LIMITS,
) -> CheckedChannel:
    """Connect to the worker called `name` at `address`.

    Raises:
        WorkerUnreachable, WorkerTimeout: nobody, or somebody else answers; its certificate is revoked or past its date.
        SecurityError: one's own files cannot be used.
    """
    try:
        peer = handshake(address, credentials, timeout_s=timeout_s)
        compare_name(peer.identity, name, address)
    except ProbeFailed as failure:
        raise failure.error from failure
    only = DER_cert_to_PEM_cert(peer.certificate).encode("ascii")
    channel = grpc.secure_channel(
        address, grpc_channel_credentials(credentials, only=only), [*options, *channel_options(name)]
    )
    return CheckedChannel(channel, peer.identity)


def sync_revocations(channel: CheckedChannel, revocations: Revocations, *, timeout_s: float) -> int:
    """Give the worker this machine's list and take its own when that is newer; the number of the worker's list.

    Raises:
        ClusterError, SecurityError: no answer, or a refusal.
    """
    request = pb.SyncRevocationsRequest(list_pem=revocations.current.pem)
    try:
        reply = TrustStub(channel.channel).SyncRevocations(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise trust_error(error, channel.peer, "SyncRevocations") from error
    if reply.list_pem:
        revocations.offer(reply.list_pem, str(channel.peer))
    return reply.number


def describe(channel: CheckedChannel, *, timeout_s: float) -> pb.DescribeReply:
    """What the worker says about itself. Raises as `sync_revocations`."""
    try:
        return TrustStub(channel.channel).Describe(pb.DescribeRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        raise trust_error(error, channel.peer, "Describe") from error


def trust_error(error: grpc.RpcError, peer: Identity, call: str) -> TitanError:
    """The named error behind a failed call."""
    if not isinstance(error, grpc.Call):
        return WorkerUnreachable(f"{call} to {peer} failed ({error})")
    code, detail = error.code(), (error.details() or "")[:1000]
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return WorkerTimeout(f"{peer} did not answer {call} in time", "See whether it hangs or is overloaded")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return WorkerUnreachable(f"{peer} does not know {call}", "Install the same version of titan-moe on both")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return SecurityError(f"{peer} refused {call}: {detail}")
    return WorkerUnreachable(f"{call} to {peer} failed: {detail or code.name}", "See the worker's log")
