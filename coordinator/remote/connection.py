"""A channel to one worker with an open session on it, and the named errors behind its gRPC failures.

Knows neither how the session began nor what is sent over it.
"""

from __future__ import annotations

import time

import grpc

from titan.common.config.hosts import Worker
from titan.common.errors import SecurityError, TitanError, WorkerLost, WorkerRefused, WorkerTimeout
from titan.common.security.channel import CheckedChannel, sync_revocations
from titan.common.security.credentials import Credentials
from titan.common.security.revocation import Revocations, require_not_revoked
from titan.common.wire.messages import MAX_MESSAGE_BYTES
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1.worker_pb2_grpc import WorkerStub

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
)


class Connection:
    """A channel to a worker with an open session. `close` ends it.

    Args:
        credentials: what the channel was opened with.
    """

    def __init__(
        self,
        worker: Worker,
        address: str,
        checked: CheckedChannel,
        revocations: Revocations,
        hello: pb.HelloReply,
        credentials: Credentials,
    ) -> None:
        self.worker = worker
        self.address = address
        self.hello = hello
        self.credentials = credentials
        self.revocations = revocations
        self.checked = checked
        self.stub = WorkerStub(checked.channel)
        self.opened_s = time.monotonic()

    def check_trust(self, theirs: int, timeout_s: float) -> None:
        """Look whether certificates were revoked since; whoever has the newer list hands it on.

        Args:
            theirs: number of the worker's list.

        Raises:
            CertificateRevoked: the worker's, or one's own. ClusterError, SecurityError: it does not take the list.
        """
        self.revocations.refresh()
        require_not_revoked(self.checked.peer, self.revocations.current)  # before it is told anything
        if theirs != self.revocations.current.number:
            sync_revocations(self.checked, self.revocations, timeout_s=timeout_s)
            require_not_revoked(self.checked.peer, self.revocations.current)
        require_not_revoked(self.credentials.identity, self.revocations.current)

    def close(self) -> None:
        self.checked.channel.close()


def from_rpc_error(error: grpc.RpcError, worker: str, call: str) -> TitanError:
    """The named error behind a gRPC failure; the worker's own sentence where it sent one."""
    if not isinstance(error, grpc.Call):
        return WorkerLost(f"{call} to worker {worker} failed ({error})")
    code, detail = error.code(), (error.details() or "")[:1000]
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return WorkerTimeout(f"worker {worker} did not answer {call} in time", "see whether it hangs or is overloaded")
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return SecurityError(f"worker {worker} refused {call}: {detail}")
    if code in (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
    ):
        return WorkerRefused(f"worker {worker} refused {call}: {detail}")
    name = code.name.lower() if code is not None else "unknown"
    return WorkerLost(f"{call} to worker {worker} failed ({name}: {detail})")
