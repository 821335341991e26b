"""Recording traces: a compact file that rotates, so that recording for days stays within a bound.

Layout: the magic, the header as JSON behind its length, then blocks. A block is (records' bytes, packed bytes, CRC-32)
and zlib-packed records; a record is a number of rows, then their ids (u16) and, when the header says so, probabilities
in 1/255 (u8). When the file is full it becomes `NAME.1` (replacing the last one) and a new one begins: both together
stay under the bound. It knows bytes, no routing.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike

from titan.common.errors import StoreError
from titan.placement.trace import TraceHeader

MAGIC = b"TITANTR1"
VERSION = 1
BLOCK_BYTES = 64 << 10
FLUSH_S = 10.0  # what a recorder that is killed loses at most, while rows come
MAX_HEADER_BYTES = 1 << 16
MAX_BLOCK_BYTES = 16 << 20
MAX_ROWS_A_STEP = 1 << 14
BLOCK = struct.Struct("<III")
ROWS = struct.Struct("<H")


class TraceWriter:
    """Appends steps to a trace file. Not thread-safe: one engine thread records.

    Args:
        path: the file; an existing one is rotated away first.
        max_bytes: bound on this file and its predecessor together.
        probabilities: whether `write` gets router probabilities.

    Raises:
        StoreError: the file cannot be written; recording is over then, and further calls do nothing.
    """

    def __init__(
        self, path: Path, header: TraceHeader, *, max_bytes: int = 256 << 20, probabilities: bool = False
    ) -> None:
        header.check()
        self.path, self.header, self.failed = path, header, False
        self._limit, self._probabilities = max(max_bytes // 2, BLOCK_BYTES), probabilities
        self._pending, self._size = bytearray(), 0
        self._flushed_s = time.monotonic()
        self._fd: int | None = None
        if path.exists():
            self._guard(self._rotate)
        self._guard(self._open)

    def write(self, ids: ArrayLike, probabilities: ArrayLike | None = None) -> None:
        """One step. `ids`, `probabilities`: [moe layers, rows, K].

        Raises:
            StoreError: see the class. ValueError: a shape or an id the header does not allow.
        """
        if self._fd is None:
            return
        array = np.asarray(ids)
        layers, top_k = len(self.header.layers), self.header.top_k
        if array.ndim != 3 or array.shape[0] != layers or array.shape[2] != top_k or array.shape[1] > MAX_ROWS_A_STEP:
            raise ValueError(f"a step has shape {array.shape}, not [{layers}, rows, {top_k}]")
        if array.size and (array.min() < 0 or array.max() >= self.header.num_experts):
            raise ValueError(f"a step has an expert outside 0..{self.header.num_experts - 1}")
        self._pending += ROWS.pack(array.shape[1])
        self._pending += array.transpose(1, 0, 2).astype("<u2").tobytes()
        if self._probabilities:
            shares = np.zeros(array.shape) if probabilities is None else np.asarray(probabilities, dtype=np.float64)
            if shares.shape != array.shape:
                raise ValueError(f"probabilities have shape {shares.shape}, not {array.shape}")
            scaled = np.rint(np.clip(np.nan_to_num(shares), 0, 1) * 255)
            self._pending += scaled.transpose(1, 0, 2).astype(np.uint8).tobytes()
        if len(self._pending) >= BLOCK_BYTES or time.monotonic() - self._flushed_s > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is pending. Raises StoreError."""
        if self._fd is not None and self._pending:
            self._guard(self._write_block)

    def close(self) -> None:
        """Flush and close; again is harmless. Raises StoreError."""
        try:
            self.flush()
        finally:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _guard(self, action) -> None:
        try:
            action()
        except OSError as error:
            self.failed = True
            self._pending.clear()
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            raise StoreError(
                f"the trace {self.path} cannot be written ({error.strerror or error}), recording is over",
                "check the folder and its free space",
            ) from error

    def _open(self) -> None:
        head = {"version": VERSION, "probabilities": self._probabilities, "layers": list(self.header.layers)}
        for key in ("fingerprint", "num_experts", "top_k"):
            head[key] = getattr(self.header, key)
        text = json.dumps(head).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        self._size = 0
        self._put(MAGIC + struct.pack("<I", len(text)) + text)

    def _rotate(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        os.replace(self.path, rotated(self.path))

    def _write_block(self) -> None:
        packed = zlib.compress(bytes(self._pending), 1)
        block = BLOCK.pack(len(self._pending), len(packed), zlib.crc32(packed)) + packed
        if self._size + len(block) > self._limit:
            self._rotate()
            self._open()
        self._put(block)
        self._pending.clear()
        self._flushed_s = time.monotonic()

    def _put(self, data: bytes) -> None:
        assert self._fd is not None
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            view = view[written:]
            self._size += written


def rotated(path: Path) -> Path:
    """Where a full file goes."""
    return path.with_name(path.name + ".1")
