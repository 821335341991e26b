"""The SSD tier: reads one expert's tensors at their offsets, straight into the memory they will live in.

Knows where bytes are (a checkpoint's ranges) and how they are accounted; nothing of slots, plans or networks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan.common.arrays import DISK_DTYPES, widen
from titan.common.errors import CheckpointChanged, StoreError
from titan.common.platform import open_for_reading
from titan.common.registry.checkpoint import Checkpoint, ComponentRange
from titan.common.registry.shape import ComponentSpec


@dataclass(slots=True)
class ReadCounts:
    """What the store has read so far: bytes from the checkpoint, system calls, experts, seconds inside reads."""

    bytes: int = 0
    reads: int = 0
    experts: int = 0
    seconds: float = 0.0


class ExpertStore:
    """Positional reads of experts from an opened checkpoint. Safe to use from several threads.

    Args:
        checkpoint: where the bytes are; the files must be those it was opened from.
        bypass_cache: read around the operating system's page cache.
    """

    def __init__(self, checkpoint: Checkpoint, *, bypass_cache: bool = False) -> None:
        self.checkpoint = checkpoint
        self.counts = ReadCounts()
        self._bypass_cache = bypass_cache
        self._identities = {shard.path: shard.identity for shard in checkpoint.shards}
        self._components = {
            layer.index: tuple(c for matrix in layer.matrices for c in matrix.components)
            for layer in checkpoint.shape.layers
        }
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read_expert(self, layer: int, expert: int, targets: Sequence[np.ndarray]) -> None:
        """Fill `targets` with one expert.

        Args:
            layer: the model's layer number.
            expert: expert number in that layer.
            targets: one writable C-contiguous array for each component, in the order of the layer's matrices and
                components: of the dtype on disk (raw bits), or float32 where the disk has a 16-bit float.

        Raises:
            CheckpointChanged: a file is not the one the checkpoint was opened from, or ends early.
            StoreError: the operating system could not read.
        """
        start = time.perf_counter()
        reads = total = 0
        ranges = self._ranges(layer, expert)
        for part, component, target in zip(ranges, self._components[layer], targets, strict=True):
            if _is_raw(component, target):
                self._read(part.file, part.offset, target)
            else:
                bits = np.empty(component.shape, DISK_DTYPES[component.dtype][0])
                self._read(part.file, part.offset, bits)
                widen(bits, component.dtype, target)
            reads += 1
            total += part.nbytes
        elapsed = time.perf_counter() - start
        with self._lock:
            self.counts.bytes += total
            self.counts.reads += reads
            self.counts.experts += 1
            self.counts.seconds += elapsed

    def read_bytes(self, layer: int, expert: int) -> bytearray:
        """One expert's components as they are on disk, one after another (to send to a worker)."""
        parts = [np.empty(c.nbytes, np.uint8) for c in self._components[layer]]
        for part, buffer in zip(self._ranges(layer, expert), parts, strict=True):
            self._read(part.file, part.offset, buffer)
        return bytearray().join(parts)  # type: ignore[arg-type]

    def _ranges(self, layer: int, expert: int) -> tuple[ComponentRange, ...]:
        try:
            return self.checkpoint.ranges(layer, expert)
        except KeyError as error:
            raise StoreError(
                f"expert {expert} of layer {layer} is not in {self.checkpoint.path}, a pack of some experts",
                "Pack it too, or keep the whole checkpoint beside the pack",
            ) from error

    def close(self) -> None:
        with self._lock:
            fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)

    def _read(self, file: Path, offset: int, target: np.ndarray) -> None:
        fd = self._fds.get(file)
        if fd is None:
            fd = self._open(file)
        view = target.data.cast("B")
        done = 0
        try:
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    raise CheckpointChanged(
                        f"{file} ends before byte {offset + len(view)}",
                        "the file changed while it was in use; restore it and start again",
                    )
                done += count
        except OSError as error:
            raise StoreError(
                f"reading {len(view)} bytes at {offset} of {file} failed ({error.strerror})",
                "check the disk, or put a healthy copy of the checkpoint in its place",
            ) from error

    def _open(self, file: Path) -> int:
        with self._lock:
            if file in self._fds:
                return self._fds[file]
            try:
                fd = open_for_reading(file, bypass_cache=self._bypass_cache)
            except OSError as error:
                raise StoreError(f"{file} cannot be opened ({error.strerror})", "restore the checkpoint") from error
            stat = os.fstat(fd)
            if (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) != self._identities[file]:
                os.close(fd)
                raise CheckpointChanged(f"{file} was replaced after it was opened", "start again")
            self._fds[file] = fd
            return fd


def _is_raw(component: ComponentSpec, target: np.ndarray) -> bool:
    return target.nbytes == component.nbytes
