"""The lane's frames: a header of 40 bytes, little endian, then a payload whose layout the kind decides.

    header   version u8 | kind u8 | dtype u8 | flags u8 | layer u32 | request id u64 | epoch u64
             | rows u32 | pairs u32 | deadline us u32 | length u32
    OPEN     token of 32 bytes                      coordinator -> worker, first frame
    OPENED   empty; `epoch` is the session's        worker -> coordinator
    EXECUTE  pair_rows [P] u32, pair_experts [P] u32, activations [R, D]
    RESULT   queue us, compute us, load us, 0: u32 each; outputs [P, D]
    FAILURE  error code, NUL, sentence, in UTF-8    request id 0 concerns the lane, not a request
    HINT     experts [P] u32; `rows` of them to be read; nobody answers
    PING     anything up to 64 KiB, comes back as PONG

Every number is bounded by `parse_header` before anything is allocated. Pure functions; knows no socket.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from titan.common.errors import ClusterError, TitanError, WireError
from titan.common.wire.checks import (
    MAX_FAILURE_CHARACTERS,
    Limits,
    checked_call,
    checked_hint,
    checked_outputs,
    failure_error,
)
from titan.common.wire.messages import (
    MAX_HINTED,
    MAX_MESSAGE_BYTES,
    MAX_PAIRS,
    MAX_ROWS,
    ExecuteCall,
    ExecuteResult,
    Hint,
)

LANE_VERSION = 1
TOKEN_BYTES = 32
MAX_PING_BYTES = 64 << 10
MAX_FAILURE_BYTES = 4 * MAX_FAILURE_CHARACTERS + 64
HEADER = struct.Struct("<BBBBIQQIIII")
HEADER_BYTES = HEADER.size
TIMES = struct.Struct("<IIII")
FLAG_SORT = 1
_KNOWN_FLAGS = FLAG_SORT

DTYPE_NUMBERS = {"float32": 1, "bfloat16": 2, "float16": 3}


class Kind(IntEnum):
    """What a frame is."""

    OPEN = 1
    OPENED = 2
    EXECUTE = 3
    RESULT = 4
    FAILURE = 5
    PING = 6
    PONG = 7
    HINT = 8


_MAX_LENGTH: dict[int, int] = {
    Kind.OPEN: TOKEN_BYTES,
    Kind.OPENED: 0,
    Kind.EXECUTE: MAX_MESSAGE_BYTES,
    Kind.RESULT: MAX_MESSAGE_BYTES,
    Kind.FAILURE: MAX_FAILURE_BYTES,
    Kind.PING: MAX_PING_BYTES,
    Kind.PONG: MAX_PING_BYTES,
    Kind.HINT: 4 * MAX_HINTED,
}
TO_WORKER = frozenset({Kind.OPEN, Kind.EXECUTE, Kind.PING, Kind.HINT})
TO_COORDINATOR = frozenset({Kind.OPENED, Kind.RESULT, Kind.FAILURE, Kind.PONG})


class Header(NamedTuple):
    """The fixed part of a frame; `length` counts the payload's bytes."""

    version: int
    kind: int
    dtype: int
    flags: int
    layer: int
    request_id: int
    epoch: int
    rows: int
    pairs: int
    deadline_us: int
    length: int


def parse_header(data: bytearray | bytes | memoryview, allowed: frozenset[Kind]) -> Header:
    """The header at the beginning of `data`.

    Raises:
        WireError: what follows cannot be a frame of this protocol; the connection is of no use any more.
    """
    fields = HEADER.unpack_from(data)
    version, kind, _, flags, _, _, _, rows, pairs, _, length = fields
    if version != LANE_VERSION:
        raise WireError(f"a frame of version {version} came, not {LANE_VERSION}")
    if kind not in allowed:
        raise WireError(f"a frame of kind {kind} came, which has no place here")
    if length > _MAX_LENGTH[kind]:
        raise WireError(f"a {Kind(kind).name} frame of {length} bytes came, more than allowed")
    if flags & ~_KNOWN_FLAGS:
        raise WireError(f"a frame with unknown flags {flags:#x} came")
    if rows > MAX_ROWS or pairs > MAX_PAIRS:
        raise WireError(f"a frame of {rows} rows and {pairs} pairs came, more than allowed")
    return Header._make(fields)


def pack(
    kind: Kind,
    *,
    length: int = 0,
    request_id: int = 0,
    epoch: int = 0,
    dtype: int = 0,
    flags: int = 0,
    layer: int = 0,
    rows: int = 0,
    pairs: int = 0,
    deadline_us: int = 0,
) -> bytes:
    """A header's bytes."""
    return HEADER.pack(LANE_VERSION, kind, dtype, flags, layer, request_id, epoch, rows, pairs, deadline_us, length)


class Parts(NamedTuple):
    """A frame as C-contiguous parts to send one after another, and the bytes of all."""

    parts: Sequence[bytes | memoryview | np.ndarray]
    nbytes: int


def whole(frame: bytes) -> Parts:
    """A frame that is in one piece."""
    return Parts((frame,), len(frame))


def encode_execute(call: ExecuteCall, epoch: int, dtype: str) -> Parts:
    """An EXECUTE frame; arrays are not copied."""
    rows, pairs = call.activations.shape[0], call.pair_rows.shape[0]
    length = call.activations.nbytes + 8 * pairs
    header = HEADER.pack(
        LANE_VERSION,
        Kind.EXECUTE,
        DTYPE_NUMBERS[dtype],
        FLAG_SORT if call.sort else 0,
        call.layer,
        call.request_id,
        epoch,
        rows,
        pairs,
        call.deadline_us,
        length,
    )
    return Parts((header, call.pair_rows, call.pair_experts, call.activations), HEADER_BYTES + length)


def decode_execute(header: Header, payload: memoryview, limits: Limits) -> ExecuteCall:
    """The checked request of an EXECUTE frame; its arrays view `payload`.

    Raises:
        WireError: sizes that do not fit each other, ids out of range, or another dtype than agreed.
    """
    if header.dtype != DTYPE_NUMBERS[limits.dtype]:
        raise WireError(f"request {header.request_id} has dtype {header.dtype}, not {limits.dtype}")
    ids = 4 * header.pairs
    return checked_call(
        limits,
        request_id=header.request_id,
        layer=header.layer,
        rows=header.rows,
        activations=payload[2 * ids :],
        pair_rows=payload[:ids],
        pair_experts=payload[ids : 2 * ids],
        sort=bool(header.flags & FLAG_SORT),
        deadline_us=header.deadline_us,
    )


def encode_hint(hint: Hint, epoch: int) -> Parts:
    """A HINT frame."""
    ids = struct.pack(f"<{len(hint.experts)}I", *hint.experts)
    header = pack(Kind.HINT, length=len(ids), epoch=epoch, layer=hint.layer, rows=hint.reads, pairs=len(hint.experts))
    return whole(header + ids)


def decode_hint(header: Header, payload: memoryview, limits: Limits) -> Hint:
    """The checked hint of a HINT frame.

    Raises:
        WireError: sizes that do not fit each other, or ids out of range.
    """
    if len(payload) != 4 * header.pairs:
        raise WireError(f"a hint of {header.pairs} experts has {len(payload)} bytes")
    experts = struct.unpack(f"<{header.pairs}I", payload)
    return checked_hint(limits, layer=header.layer, experts=experts, reads=header.rows)


def encode_result(result: ExecuteResult, epoch: int, dtype: str, queue_us: int) -> Parts:
    """A RESULT frame; the outputs are not copied. `queue_us` stands for what the result has."""
    pairs = result.outputs.shape[0]
    length = TIMES.size + result.outputs.nbytes
    header = HEADER.pack(
        LANE_VERSION,
        Kind.RESULT,
        DTYPE_NUMBERS[dtype],
        0,
        0,
        result.request_id,
        epoch,
        0,
        pairs,
        0,
        length,
    )
    times = TIMES.pack(queue_us, result.compute_us, result.load_us, 0)
    return Parts((header, times, result.outputs), HEADER_BYTES + length)


def decode_result(header: Header, payload: memoryview, call: ExecuteCall, *, dtype: str, worker: str) -> ExecuteResult:
    """The checked answer to `call` in a RESULT or FAILURE frame; outputs view `payload`.

    Raises:
        ClusterError: the worker refused, or answered something else than what was asked for.
    """
    if header.kind == Kind.FAILURE:
        raise decode_failure(payload, call, worker)
    if len(payload) < TIMES.size or header.dtype != DTYPE_NUMBERS[dtype]:
        payload = payload[:0]  # the check below says what is wrong with it
        return ExecuteResult(header.request_id, checked_outputs(payload, call, dtype=dtype, worker=worker), 0, 0)
    queue_us, compute_us, load_us, _ = TIMES.unpack_from(payload)
    outputs = checked_outputs(payload[TIMES.size :], call, dtype=dtype, worker=worker)
    return ExecuteResult(header.request_id, outputs, queue_us, compute_us, load_us)


def encode_failure(request_id: int, epoch: int, error: TitanError) -> bytes:
    """A FAILURE frame."""
    text = f"{error.code}\0{str(error)[:MAX_FAILURE_CHARACTERS]}".encode()
    return pack(Kind.FAILURE, length=len(text), request_id=request_id, epoch=epoch) + text


def split_failure(payload: memoryview) -> tuple[str, str]:
    """Code and sentence of a FAILURE frame."""
    code, _, message = bytes(payload).decode("utf-8", "replace").partition("\0")
    return code[:64], message


def decode_failure(payload: memoryview, call: ExecuteCall, worker: str) -> ClusterError:
    code, message = split_failure(payload)
    return failure_error(worker, call, code, message)
