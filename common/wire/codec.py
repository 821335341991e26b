"""Execute messages to and from protobuf, with every field checked before it is used.

The same checks hold whatever the transport. Knows sizes and ids; not which experts a worker holds.
"""

from __future__ import annotations

import numpy as np

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.errors import WireError, WorkerBadReply
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.proto.titan.v1 import worker_pb2 as pb

MAX_ROWS = 1 << 16
_U32 = np.dtype("<u4")


def encode_call(call: ExecuteCall, session: pb.Session) -> pb.ExecuteRequest:
    return pb.ExecuteRequest(
        session=session,
        request_id=call.request_id,
        layer=call.layer,
        rows=call.activations.shape[0],
        activations=call.activations.tobytes(),
        pair_rows=call.pair_rows.tobytes(),
        pair_experts=call.pair_experts.tobytes(),
        sort=call.sort,
        deadline_us=min(int(call.deadline_s * 1e6), 0xFFFFFFFF),
    )


def decode_call(request: pb.ExecuteRequest, *, hidden_size: int, num_experts: int, dtype: str) -> ExecuteCall:
    """Check and view a request of a peer; arrays share the message's memory.

    Raises:
        WireError: sizes that do not fit each other, or ids out of range.
    """
    bits = COMPUTE_DTYPES[dtype][0]
    rows = request.rows
    if not 1 <= rows <= MAX_ROWS:
        raise WireError(f"request {request.request_id} has {rows} rows, not 1..{MAX_ROWS}")
    if len(request.activations) != rows * hidden_size * bits.itemsize:
        raise WireError(
            f"request {request.request_id} carries {len(request.activations)} bytes of activations for "
            f"{rows} rows of {hidden_size} {dtype}"
        )
    if not request.pair_rows or len(request.pair_rows) % 4 or len(request.pair_rows) != len(request.pair_experts):
        raise WireError(
            f"request {request.request_id} has {len(request.pair_rows)} bytes of rows and "
            f"{len(request.pair_experts)} bytes of experts"
        )
    pair_rows = np.frombuffer(request.pair_rows, _U32)
    pair_experts = np.frombuffer(request.pair_experts, _U32)
    if int(pair_rows.max()) >= rows:
        raise WireError(f"request {request.request_id} names row {int(pair_rows.max())} of {rows}")
    if int(pair_experts.max()) >= num_experts:
        raise WireError(f"request {request.request_id} names expert {int(pair_experts.max())} of {num_experts}")
    return ExecuteCall(
        request_id=request.request_id,
        layer=request.layer,
        activations=np.frombuffer(request.activations, bits).reshape(rows, hidden_size),
        pair_rows=pair_rows,
        pair_experts=pair_experts,
        sort=request.sort,
        deadline_s=request.deadline_us / 1e6,
    )


def encode_result(result: ExecuteResult) -> pb.ExecuteReply:
    return pb.ExecuteReply(
        request_id=result.request_id,
        outputs=result.outputs.tobytes(),
        queue_us=result.queue_us,
        compute_us=result.compute_us,
    )


def decode_result(reply: pb.ExecuteReply, call: ExecuteCall, *, dtype: str, worker: str) -> ExecuteResult:
    """Check a worker's answer to `call`.

    Raises:
        WorkerBadReply: another size than asked for, or a value that is not finite.
    """
    bits = COMPUTE_DTYPES[dtype][0]
    shape = (call.pair_rows.shape[0], call.activations.shape[1])
    if len(reply.outputs) != shape[0] * shape[1] * bits.itemsize:
        raise WorkerBadReply(
            f"worker {worker} answered {len(reply.outputs)} bytes for {shape[0]} outputs of {shape[1]} {dtype} "
            f"in layer {call.layer}"
        )
    outputs = np.frombuffer(reply.outputs, bits).reshape(shape)
    if not _finite(outputs, dtype):
        raise WorkerBadReply(f"worker {worker} answered values that are not finite in layer {call.layer}")
    return ExecuteResult(reply.request_id, outputs, reply.queue_us, reply.compute_us)


def _finite(outputs: np.ndarray, dtype: str) -> bool:
    if dtype == "float32":
        return bool(np.isfinite(outputs).all())
    exponent = 0x7F80 if dtype == "bfloat16" else 0x7C00
    return not bool(((outputs & exponent) == exponent).any())
