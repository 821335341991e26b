"""Execute messages to and from protobuf. What must hold of them is in `checks`."""

from __future__ import annotations

from titan.common.wire.checks import Limits, checked_call, checked_hint, checked_outputs, failure_error
from titan.common.wire.messages import ExecuteCall, ExecuteResult, Hint
from titan.proto.titan.v1 import worker_pb2 as pb


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
        deadline_us=call.deadline_us,
    )


def decode_call(request: pb.ExecuteRequest, limits: Limits) -> ExecuteCall:
    """Check and view a request of a peer; arrays share the message's memory.

    Raises:
        WireError: sizes that do not fit each other, or ids out of range.
    """
    return checked_call(
        limits,
        request_id=request.request_id,
        layer=request.layer,
        rows=request.rows,
        activations=request.activations,
        pair_rows=request.pair_rows,
        pair_experts=request.pair_experts,
        sort=request.sort,
        deadline_us=request.deadline_us,
    )


def encode_hint(hint: Hint, session: pb.Session) -> pb.PrefetchRequest:
    return pb.PrefetchRequest(session=session, layer=hint.layer, reads=hint.reads, experts=hint.experts)


def decode_hint(request: pb.PrefetchRequest, limits: Limits) -> Hint:
    """Check a hint of a peer; raises WireError."""
    return checked_hint(limits, layer=request.layer, experts=tuple(request.experts), reads=request.reads)


def encode_result(result: ExecuteResult) -> pb.ExecuteReply:
    return pb.ExecuteReply(
        request_id=result.request_id,
        outputs=result.outputs.tobytes(),
        queue_us=result.queue_us,
        compute_us=result.compute_us,
        load_us=result.load_us,
    )


def decode_result(reply: pb.ExecuteReply, call: ExecuteCall, *, dtype: str, worker: str) -> ExecuteResult:
    """Check a worker's answer to `call`.

    Raises:
        ClusterError: the worker refused.
        WorkerBadReply: another size than asked for, or a value that is not finite.
    """
    if reply.HasField("failure"):
        raise failure_error(worker, call, reply.failure.code, reply.failure.message)
    outputs = checked_outputs(reply.outputs, call, dtype=dtype, worker=worker)
    return ExecuteResult(reply.request_id, outputs, reply.queue_us, reply.compute_us, reply.load_us)
