"""Every error Titan raises on purpose, with the status each boundary shows for it.

    TitanError
    ├── ConfigError                 hosts.yaml, command line, sizes and times
    │   └── AddressInUse            the port to listen on is taken
    ├── CheckpointError             a model directory that cannot be served as it is
    │   ├── CheckpointMissing       directory, config, shard or tensor absent
    │   ├── CheckpointTruncated     a file ends before its tensors do, or a header cannot be read
    │   ├── CheckpointContradiction two sources of truth disagree (config, index, shapes, shards)
    │   ├── CheckpointChanged       the file is not the one that was opened
    │   ├── DownloadFailed          a hub does not give it
    │   └── UnsupportedFamily       not in the verified table
    ├── StoreError                  reading an expert from disk failed, or writing a pack
    │   ├── ChecksumMismatch        an expert's bytes are not those that were packed
    │   ├── DiskFull
    │   └── DiskStalled             a read has not ended within its deadline
    ├── MemoryBudgetError           the memory given cannot hold the smallest useful configuration
    ├── PlanError                   a plan that does not fit this checkpoint or these nodes
    │   ├── PlanVersionError
    │   └── PlanViolation           (mem), (exec) or (res) of the formulation does not hold
    ├── SecurityError               certificates and keys
    │   ├── CertificateMissing
    │   ├── CertificateExpired
    │   ├── CertificateInvalid
    │   ├── CertificateRevoked
    │   ├── EnrolmentRefused        a one-time code, or what came with it, is not right
    │   ├── KeyExists               a private key would be overwritten
    │   └── RoleRefused             the role in the certificate may not do this
    ├── ClusterError                talking to a worker, or a worker talking to its coordinator
    │   ├── WorkerUnreachable       refused, no route, name unknown, TLS failed
    │   ├── WorkerTimeout           no answer before the deadline
    │   ├── WorkerLost              the connection broke with a request under way
    │   ├── WorkerBadReply          an answer that is not what was asked for
    │   ├── WorkerRefused           Hello found another model, version, dtype or owner
    │   ├── WorkerDraining
    │   ├── WorkerOverloaded
    │   ├── ExpertLost              a worker cannot read an expert from its disk any more; it has its others
    │   └── SessionUnknown          session id or epoch is not a live one
    ├── WireError                   a message outside the bounds of the protocol
    ├── RequestError                what an API client sent
    │   ├── InvalidRequest
    │   ├── UnknownModel
    │   ├── ContextTooLong
    │   ├── RequestTooLarge
    │   ├── RequestTimeout          the body did not arrive in time
    │   ├── Unauthorized
    │   ├── Forbidden               a Host or Origin that may not talk to this address
    │   └── QueueFull
    └── EngineError                 the generation engine
        ├── EngineNotReady
        └── EngineFailed

A message is one or two sentences: what is wrong and where (host, file, tensor), then the mend.
The same sentence reaches the API, the command line and the log. This module knows nobody else.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AddressInUse",
    "CertificateExpired",
    "CertificateInvalid",
    "CertificateMissing",
    "CertificateRevoked",
    "CheckpointChanged",
    "CheckpointContradiction",
    "CheckpointError",
    "CheckpointMissing",
    "CheckpointTruncated",
    "ChecksumMismatch",
    "ClusterError",
    "ConfigError",
    "ContextTooLong",
    "DiskFull",
    "DiskStalled",
    "DownloadFailed",
    "EngineError",
    "EngineFailed",
    "EngineNotReady",
    "EnrolmentRefused",
    "ExpertLost",
    "Forbidden",
    "InvalidRequest",
    "KeyExists",
    "MemoryBudgetError",
    "PlanError",
    "PlanVersionError",
    "PlanViolation",
    "QueueFull",
    "RequestError",
    "RequestTimeout",
    "RequestTooLarge",
    "RoleRefused",
    "SecurityError",
    "SessionUnknown",
    "StoreError",
    "TitanError",
    "Unauthorized",
    "UnknownModel",
    "UnsupportedFamily",
    "WireError",
    "WorkerBadReply",
    "WorkerDraining",
    "WorkerLost",
    "WorkerOverloaded",
    "WorkerRefused",
    "WorkerTimeout",
    "WorkerUnreachable",
]


class TitanError(Exception):
    """Base of the tree.

    Args:
        cause: what is wrong and where, without a closing full stop.
        mend: what the reader can do about it, without a closing full stop.
    """

    grpc_status: ClassVar[str] = "INTERNAL"  # a name of grpc.StatusCode
    http_status: ClassVar[int] = 500
    exit_status: ClassVar[int] = 1

    def __init__(self, cause: str, mend: str = "") -> None:
        self.cause = cause.rstrip(". ")
        self.mend = mend.rstrip(". ")
        super().__init__(f"{self.cause}. {self.mend}." if self.mend else f"{self.cause}.")

    @property
    def code(self) -> str:
        """Stable machine-readable name: `WorkerTimeout` -> `worker_timeout`."""
        name = type(self).__name__
        return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


class ConfigError(TitanError):
    grpc_status = "INVALID_ARGUMENT"
    exit_status = 2


class AddressInUse(ConfigError):
    exit_status = 1


class CheckpointError(TitanError):
    grpc_status = "FAILED_PRECONDITION"


class CheckpointMissing(CheckpointError):
    grpc_status = "NOT_FOUND"


class CheckpointTruncated(CheckpointError):
    grpc_status = "DATA_LOSS"


class CheckpointContradiction(CheckpointError):
    pass


class CheckpointChanged(CheckpointError):
    grpc_status = "DATA_LOSS"


class UnsupportedFamily(CheckpointError):
    grpc_status = "UNIMPLEMENTED"


class DownloadFailed(CheckpointError):
    pass


class StoreError(TitanError):
    grpc_status = "DATA_LOSS"


class ChecksumMismatch(StoreError):
    pass


class DiskFull(StoreError):
    grpc_status = "RESOURCE_EXHAUSTED"


class DiskStalled(StoreError):
    grpc_status = "DEADLINE_EXCEEDED"


class MemoryBudgetError(TitanError):
    grpc_status = "RESOURCE_EXHAUSTED"


class PlanError(TitanError):
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class PlanVersionError(PlanError):
    pass


class PlanViolation(PlanError):
    pass


class SecurityError(TitanError):
    grpc_status = "UNAUTHENTICATED"


class CertificateMissing(SecurityError):
    exit_status = 2


class CertificateExpired(SecurityError):
    pass


class CertificateInvalid(SecurityError):
    pass


class CertificateRevoked(SecurityError):
    pass


class EnrolmentRefused(SecurityError):
    pass


class KeyExists(SecurityError):
    pass


class RoleRefused(SecurityError):
    grpc_status = "PERMISSION_DENIED"
    http_status = 403


class ClusterError(TitanError):
    grpc_status = "UNAVAILABLE"
    http_status = 503


class WorkerUnreachable(ClusterError):
    pass


class WorkerTimeout(ClusterError):
    grpc_status = "DEADLINE_EXCEEDED"


class WorkerLost(ClusterError):
    pass


class WorkerBadReply(ClusterError):
    grpc_status = "DATA_LOSS"


class WorkerRefused(ClusterError):
    grpc_status = "FAILED_PRECONDITION"


class WorkerDraining(ClusterError):
    pass


class WorkerOverloaded(ClusterError):
    grpc_status = "RESOURCE_EXHAUSTED"


class ExpertLost(ClusterError):
    grpc_status = "DATA_LOSS"


class SessionUnknown(ClusterError):
    grpc_status = "ABORTED"


class WireError(TitanError):
    grpc_status = "INVALID_ARGUMENT"


class RequestError(TitanError):
    """What an API client sent. `param` names the field, as OpenAI's error shape has it."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, cause: str, mend: str = "", *, param: str | None = None) -> None:
        super().__init__(cause, mend)
        self.param = param


class InvalidRequest(RequestError):
    pass


class UnknownModel(RequestError):
    http_status = 404


class ContextTooLong(RequestError):
    pass


class RequestTooLarge(RequestError):
    http_status = 413


class RequestTimeout(RequestError):
    http_status = 408


class Unauthorized(RequestError):
    http_status = 401


class Forbidden(RequestError):
    http_status = 403


class QueueFull(RequestError):
    http_status = 429


class EngineError(TitanError):
    pass


class EngineNotReady(EngineError):
    grpc_status = "UNAVAILABLE"
    http_status = 503


class EngineFailed(EngineError):
    http_status = 500
