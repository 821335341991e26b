"""Read the header of one safetensors file, and believe nothing in it that the file does not bear out.

Format: 8 bytes little-endian length N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the tensors.
Reads no tensor bytes. Knows neither directories, nor configs, nor which tensor belongs to what.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from titan.common.errors import CheckpointContradiction, CheckpointMissing, CheckpointTruncated
from titan.common.registry.bounded_json import parse_object

__all__ = ["MAX_HEADER_BYTES", "MAX_TENSORS", "Identity", "ShardHeader", "TensorInfo", "identity_of", "read_header"]

MAX_HEADER_BYTES = 100_000_000  # upstream's own limit
MAX_TENSORS = 1 << 18  # Kimi-K2 has 212,000 with one tensor an expert and component
MAX_RANK = 8
MAX_NAME_CHARACTERS = 512
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

Identity = tuple[int, int, int, int]  # st_dev, st_ino, size in bytes, mtime in ns


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `offset` counts from the start of `file`; both in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One file: its logical path (symlinks kept), its size, what it was when opened, its tensors by name."""

    path: Path
    nbytes: int
    identity: Identity
    tensors: dict[str, TensorInfo]


def identity_of(status: os.stat_result) -> Identity:
    """What must not change while a file is in use."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of `path`; symlinks are followed, the name is kept.

    Raises:
        CheckpointMissing: the file is absent, a dangling link, a directory or not readable.
        CheckpointTruncated: the file is shorter than its header or its tensors, or the header is not one.
        CheckpointContradiction: a tensor's dtype, shape and offsets disagree, or two tensors overlap.
    """
    try:
        # O_NONBLOCK: opening a FIFO of that name must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointMissing(
            f"{path} cannot be opened ({error.strerror})", "Download or copy the file again"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointMissing(f"{path} is not a regular file", "Put the model's safetensors file there")
        text = _header_text(path, descriptor, status.st_size)
    except OSError as error:
        raise CheckpointTruncated(
            f"{path} cannot be read ({error.strerror})", "Check the disk, then copy the file again"
        ) from error
    finally:
        os.close(descriptor)
    tensors = _tensors(path, text, data_start=8 + len(text), file_bytes=status.st_size)
    return ShardHeader(path, status.st_size, identity_of(status), tensors)


def _header_text(path: Path, descriptor: int, file_bytes: int) -> bytes:
    length = int.from_bytes(_read(descriptor, 8, 0), "little") if file_bytes >= 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
        raise CheckpointTruncated(
            f"{path} has {file_bytes} bytes and announces a header of {length}: it is truncated or not safetensors",
            "Download or copy the file again",
        )
    text = _read(descriptor, length, 8)
    if len(text) < length:
        raise CheckpointTruncated(f"{path} became shorter while it was read", "Copy the file again")
    return text


def _read(descriptor: int, nbytes: int, offset: int) -> bytes:
    parts = []
    while nbytes > 0 and (part := os.pread(descriptor, nbytes, offset)):
        parts.append(part)
        nbytes -= len(part)
        offset += len(part)
    return b"".join(parts)


def _tensors(path: Path, text: bytes, data_start: int, file_bytes: int) -> dict[str, TensorInfo]:
    try:
        raw = parse_object(text, 16 * MAX_TENSORS)
    except ValueError as error:
        raise CheckpointTruncated(
            f"the header of {path} cannot be read ({str(error)[:200]})", "Download or copy the file again"
        ) from error
    if len(raw) > MAX_TENSORS + 1:
        raise CheckpointTruncated(f"the header of {path} has more than {MAX_TENSORS} tensors", "Split the file")
    raw.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, data_start, file_bytes) for name, entry in raw.items()}
    end, previous = data_start, ""
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset < end and tensor.nbytes:
            raise CheckpointContradiction(
                f"in {path} the tensors {previous} and {tensor.name} overlap", "Download or write the file again"
            )
        end, previous = max(end, tensor.offset + tensor.nbytes), tensor.name
    return tensors


def _tensor(path: Path, name: str, entry: object, data_start: int, file_bytes: int) -> TensorInfo:
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise CheckpointTruncated(f"the header of {path} has a tensor name that is not one", "Download the file again")

    def wrong(what: str) -> CheckpointContradiction:
        return CheckpointContradiction(
            f"the header of {path} contradicts itself: {name} {what}", "Download or write the file again"
        )

    if not isinstance(entry, dict):
        raise wrong("is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise wrong(f"has dtype {str(dtype)[:32]!r}")
    if not _naturals(shape, MAX_RANK) or not _naturals(offsets, 2) or len(offsets) != 2:
        raise wrong("has no valid shape and data_offsets")
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if end < begin or bits != 8 * (end - begin):
        raise wrong(f"is {dtype} {shape}, {-(-bits // 8)} bytes, but lies at {begin}..{end}")
    if data_start + end > file_bytes:
        raise CheckpointTruncated(
            f"{path} ends at byte {file_bytes}, before its tensor {name}, which ends at {data_start + end}",
            "The download or copy is incomplete: repeat it",
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _naturals(value: object, at_most: int) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= at_most
        and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
    )
