"""Reading traces back, every byte checked. See `trace_file` for the layout. Knows bytes, no routing."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from titan.common.errors import PlanError
from titan.placement.trace import Trace, TraceHeader, check_ids
from titan.placement.trace_file import (
    BLOCK,
    MAGIC,
    MAX_BLOCK_BYTES,
    MAX_HEADER_BYTES,
    MAX_ROWS_A_STEP,
    ROWS,
    VERSION,
    rotated,
)


def read_trace(path: Path, *, fingerprint: str | None = None, max_rows: int = 200_000, min_rows: int = 0) -> Trace:
    """Read a trace and the file rotated away before it, the last `max_rows` rows.

    A block that the end of the file cuts short (the recorder was killed) is left out.

    Args:
        fingerprint: refuse the trace of another checkpoint.
        min_rows: refuse one with fewer.

    Raises:
        PlanError: absent, not a trace, another version or model, damaged, or with impossible ids.
    """
    older = rotated(path)
    header, with_probabilities, records = _read_file(path)
    if older.is_file():
        before, before_probabilities, earlier = _read_file(older)
        if (before, before_probabilities) == (header, with_probabilities):
            records = earlier + records
    if fingerprint is not None and header.fingerprint != fingerprint:
        raise PlanError(
            f"{path} is a trace of another model ({header.fingerprint[:12]}…, this one is {fingerprint[:12]}…)",
            "record a trace with this model",
        )
    total = 0
    kept: list[tuple[int, bytes]] = []
    for rows, body in reversed(records):
        kept.append((rows, body))
        total += rows
        if total >= max_rows:
            break
    if total < min_rows:
        raise PlanError(
            f"{path} has {total} rows, at least {min_rows} are needed",
            "answer some requests with titan-coordinator --trace FILE; rows are written every 10 s, and when it stops",
        )
    kept.reverse()
    shape = (len(header.layers), header.top_k)
    per_row = shape[0] * shape[1]
    ids = np.empty((total, *shape), dtype=np.uint16)
    shares = np.empty((total, *shape), dtype=np.float32) if with_probabilities else None
    at = 0
    for rows, body in kept:
        ids[at : at + rows] = np.frombuffer(body, "<u2", rows * per_row).reshape(rows, *shape)
        if shares is not None:
            raw = np.frombuffer(body, np.uint8, rows * per_row, offset=2 * rows * per_row)
            shares[at : at + rows] = raw.reshape(rows, *shape) / 255
        at += rows
    step = np.repeat(np.arange(len(kept)), [rows for rows, _ in kept]) if kept else np.zeros(0, dtype=np.int64)
    trace = Trace(header, ids[-max_rows:], step[-max_rows:], None if shares is None else shares[-max_rows:])
    check_ids(header, trace.ids)
    return trace


def _read_file(path: Path) -> tuple[TraceHeader, bool, list[tuple[int, bytes]]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"the trace {path} cannot be read ({error.strerror or error})", "check the path") from error
    if data[: len(MAGIC)] != MAGIC or len(data) < len(MAGIC) + 4:
        raise PlanError(f"{path} is not a trace", "record one with titan-coordinator --trace FILE")
    (length,) = struct.unpack_from("<I", data, len(MAGIC))
    start = len(MAGIC) + 4
    if length > MAX_HEADER_BYTES or start + length > len(data):
        raise PlanError(f"the header of {path} is cut short or too long", "record the trace again")
    header, probabilities = _header(path, data[start : start + length])
    per_row = len(header.layers) * header.top_k * (3 if probabilities else 2)
    records: list[tuple[int, bytes]] = []
    for raw in _blocks(path, data, start + length):
        at = 0
        while at < len(raw):
            end = at + ROWS.size
            rows = ROWS.unpack_from(raw, at)[0] if end <= len(raw) else MAX_ROWS_A_STEP + 1
            if rows > MAX_ROWS_A_STEP or end + rows * per_row > len(raw):
                raise PlanError(f"a block of {path} does not hold whole steps", "record the trace again")
            records.append((rows, raw[end : end + rows * per_row]))
            at = end + rows * per_row
    return header, probabilities, records


def _blocks(path: Path, data: bytes, at: int) -> Iterator[bytes]:
    while at + BLOCK.size <= len(data):
        size, packed, crc = BLOCK.unpack_from(data, at)
        body = data[at + BLOCK.size : at + BLOCK.size + packed]
        if size > MAX_BLOCK_BYTES or packed > MAX_BLOCK_BYTES:
            raise PlanError(f"{path} has a block of {size} bytes at {at}, it is damaged", "record the trace again")
        if len(body) < packed:
            return
        if zlib.crc32(body) != crc:
            raise PlanError(f"the block of {path} at byte {at} is damaged", "record the trace again")
        unpacker = zlib.decompressobj()
        try:
            raw = unpacker.decompress(body, size)
        except zlib.error as error:
            raise PlanError(f"the block of {path} at byte {at} is damaged ({error})", "record it again") from error
        if len(raw) != size:
            raise PlanError(f"the block of {path} at byte {at} has another size than it says", "record it again")
        yield raw
        at += BLOCK.size + packed


def _header(path: Path, text: bytes) -> tuple[TraceHeader, bool]:
    try:
        raw = json.loads(text)
        version = raw["version"]
        header = TraceHeader(raw["fingerprint"], tuple(raw["layers"]), raw["num_experts"], raw["top_k"])
        probabilities = bool(raw["probabilities"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(f"the header of {path} cannot be read ({error})", "record the trace again") from error
    if version != VERSION:
        raise PlanError(f"{path} has trace version {version!r}, this Titan reads {VERSION}", "record it again")
    header.check()
    return header, probabilities
