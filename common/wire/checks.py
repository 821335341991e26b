"""What a request and a reply of Execute must satisfy, whatever the transport that carried them.

Sizes are checked before anything is viewed, ids before anything is executed. Knows neither protobuf nor sockets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.errors import (
    ClusterError,
    ExpertLost,
    SessionUnknown,
    WireError,
    WorkerBadReply,
    WorkerDraining,
    WorkerOverloaded,
    WorkerRefused,
    WorkerTimeout,
)
from titan.common.wire.messages import MAX_HINTED, MAX_MESSAGE_BYTES, MAX_PAIRS, MAX_ROWS, ExecuteCall, Hint

U32 = np.dtype("<u4")
F32 = np.dtype("<f4")
MAX_FAILURE_CHARACTERS = 1000
_FAILURES: dict[str, type[ClusterError]] = {  # by TitanError.code
    "expert_lost": ExpertLost,
    "session_unknown": SessionUnknown,
    "worker_draining": WorkerDraining,
    "worker_overloaded": WorkerOverloaded,
    "worker_timeout": WorkerTimeout,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What Hello agreed on: D, experts a layer, the dtype of activations on the wire, whether scores may come."""

    hidden_size: int
    num_experts: int
    dtype: str
    reduced: bool = False
    bits: np.dtype = field(init=False)
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        bits = COMPUTE_DTYPES[self.dtype][0]
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "row_bytes", self.hidden_size * bits.itemsize)


def checked_call(
    limits: Limits,
    *,
    request_id: int,
    layer: int,
    rows: int,
    activations: bytes | memoryview,
    pair_rows: bytes | memoryview,
    pair_experts: bytes | memoryview,
    sort: bool,
    deadline_us: int,
    scores: bytes | memoryview | None = None,
) -> ExecuteCall:
    """A peer's request as a value whose arrays view the memory given.

    Raises:
        WireError: sizes that do not fit each other, ids out of range, or scores that are not to be used.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise WireError(f"request {request_id} has {rows} rows, not 1..{MAX_ROWS}")
    if len(activations) != rows * limits.row_bytes:
        raise WireError(
            f"request {request_id} carries {len(activations)} bytes of activations for {rows} rows of "
            f"{limits.hidden_size} {limits.dtype}"
        )
    pairs, odd = divmod(len(pair_rows), 4)
    if not 1 <= pairs <= MAX_PAIRS or odd or len(pair_rows) != len(pair_experts):
        raise WireError(
            f"request {request_id} has {len(pair_rows)} bytes of rows and {len(pair_experts)} bytes of experts, not "
            f"1..{MAX_PAIRS} pairs"
        )
    if pairs * limits.row_bytes > MAX_MESSAGE_BYTES:
        raise WireError(f"request {request_id} asks for {pairs * limits.row_bytes} bytes of outputs, too many for one")
    row_ids, expert_ids = np.frombuffer(pair_rows, U32), np.frombuffer(pair_experts, U32)
    if (highest := _highest(row_ids)) >= rows:
        raise WireError(f"request {request_id} names row {highest} of {rows}")
    if (highest := _highest(expert_ids)) >= limits.num_experts:
        raise WireError(f"request {request_id} names expert {highest} of {limits.num_experts}")
    values = np.frombuffer(activations, limits.bits).reshape(rows, limits.hidden_size)
    weights = None if scores is None else _checked_scores(limits, request_id, pairs, scores)
    return ExecuteCall(request_id, layer, values, row_ids, expert_ids, sort, deadline_us / 1e6, weights)


def _checked_scores(limits: Limits, request_id: int, pairs: int, scores: bytes | memoryview) -> np.ndarray:
    if not limits.reduced:
        raise WireError(f"request {request_id} carries scores, but this session did not agree on reduced precision")
    if len(scores) != 4 * pairs:
        raise WireError(f"request {request_id} carries {len(scores)} bytes of scores for {pairs} pairs")
    values = np.frombuffer(scores, F32)
    if not _finite(values, "float32"):
        raise WireError(f"request {request_id} carries scores that are not finite")
    return values


def checked_hint(limits: Limits, *, layer: int, experts: Sequence[int], reads: int) -> Hint:
    """A peer's hint as a value.

    Raises:
        WireError: too many experts, none, one that does not exist, or the same one twice.
    """
    if not 1 <= len(experts) <= MAX_HINTED or not 1 <= reads <= len(experts):
        raise WireError(f"a hint of {len(experts)} experts, {reads} of them to be read, is out of bounds")
    if max(experts) >= limits.num_experts:
        raise WireError(f"a hint names expert {max(experts)} of {limits.num_experts}")
    if len(set(experts)) != len(experts):
        raise WireError("a hint names an expert twice")
    return Hint(layer, experts, reads)


def checked_outputs(
    outputs: bytes | memoryview, call: ExecuteCall, *, dtype: str, worker: str, reduced: bool = False
) -> np.ndarray:
    """A worker's outputs for `call`: [P, D], or [R, D] when sums were asked for; raw bits that view the memory given.

    Args:
        reduced: whether the worker says that these are sums.

    Raises:
        WorkerBadReply: another size or kind than asked for, or a value that is not finite.
    """
    if reduced != (call.scores is not None):
        raise WorkerBadReply(
            f"worker {worker} answered {'sums' if reduced else 'single outputs'} in layer {call.layer}, which was "
            f"asked for {'single outputs' if reduced else 'sums'}"
        )
    bits = COMPUTE_DTYPES[dtype][0]
    shape = (call.activations.shape[0] if reduced else call.pair_rows.shape[0], call.activations.shape[1])
    if len(outputs) != shape[0] * shape[1] * bits.itemsize:
        raise WorkerBadReply(
            f"worker {worker} answered {len(outputs)} bytes for {shape[0]} outputs of {shape[1]} {dtype} "
            f"in layer {call.layer}"
        )
    values = np.frombuffer(outputs, bits).reshape(shape)
    if not _finite(values, dtype):
        raise WorkerBadReply(f"worker {worker} answered values that are not finite in layer {call.layer}")
    return values


def failure_error(worker: str, call: ExecuteCall, code: str, message: str) -> ClusterError:
    """The named error behind a worker's refusal of `call`."""
    kind = _FAILURES.get(code, WorkerRefused)
    return kind(f"worker {worker} did not execute layer {call.layer}: {message[:MAX_FAILURE_CHARACTERS]}")


def _highest(ids: np.ndarray) -> int:
    return max(ids.tolist()) if ids.size <= 64 else int(ids.max())  # a list is faster than numpy's reduction at first


def _finite(outputs: np.ndarray, dtype: str) -> bool:
    if dtype == "float32":
        # A sum of squares is finite only if every value is; when it is not, it may just have overflowed.
        return math.isfinite(np.vdot(outputs, outputs)) or bool(np.isfinite(outputs).all())
    exponent = 0x7F80 if dtype == "bfloat16" else 0x7C00
    return not bool(((outputs & exponent) == exponent).any())
