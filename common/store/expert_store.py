"""The SSD tier: reads experts at their offsets, straight into the memory they will live in.

Knows where bytes are (a checkpoint's ranges), what to do when a copy of them fails, and how reads are accounted;
nothing of slots, plans or networks.
"""

from __future__ import annotations

import errno
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan.common.arrays import DISK_DTYPES, widen
from titan.common.errors import CheckpointError, ChecksumMismatch, StoreError, TitanError
from titan.common.log import get_logger
from titan.common.registry.checkpoint import Checkpoint, open_checkpoint
from titan.common.registry.layout import ComponentRange
from titan.common.registry.shape import ComponentSpec
from titan.common.store.files import CacheMode, ShardFiles
from titan.common.store.scatter import Segment, read_run, runs_of

__all__ = ["ExpertStore", "ReadCounts"]

log = get_logger("store")

Targets = Sequence[np.ndarray]
VERIFY = ("never", "first", "always")


@dataclass(slots=True)
class ReadCounts:
    """What the store has done so far.

    Args:
        bytes, reads, experts, seconds: bytes of experts, system calls, experts, and seconds inside reads (over all
            threads: w of them reading at once count w times).
        retries: reads repeated after an error of the device.
        other_copy: experts that came from another copy.
        mismatches: experts whose checksum was wrong.
    """

    bytes: int = 0
    reads: int = 0
    experts: int = 0
    seconds: float = 0.0
    retries: int = 0
    other_copy: int = 0
    mismatches: int = 0


class _Copy:
    """One directory with these experts. `usable` is False once it has given wrong bytes."""

    def __init__(self, checkpoint: Checkpoint, mode: CacheMode) -> None:
        self.checkpoint = checkpoint
        self.files = ShardFiles(checkpoint.shards, mode)
        self.usable = True
        self.verified: set[tuple[int, int]] = set()
        self._places: dict[tuple[int, int], tuple[tuple[Path, int], ...]] = {}

    def places(self, layer: int, expert: int) -> tuple[tuple[Path, int], ...]:
        """(file, offset) a component. Raises StoreError when this copy does not hold the expert."""
        found = self._places.get((layer, expert))
        if found is None:
            found = tuple((part.file, part.offset) for part in self.ranges(layer, expert))
            self._places[layer, expert] = found
        return found

    def ranges(self, layer: int, expert: int) -> tuple[ComponentRange, ...]:
        try:
            return self.checkpoint.ranges(layer, expert)
        except KeyError as error:
            raise StoreError(
                f"expert {expert} of layer {layer} is not in {self.checkpoint.path}, a pack of some experts",
                "Pack it too, or keep the whole checkpoint beside the pack",
            ) from error

    def checksum(self, layer: int, expert: int) -> int | None:
        pack = self.checkpoint.pack
        return None if pack is None else pack.checksums[layer][expert]


class ExpertStore:
    """Positional reads of experts from an opened checkpoint. Safe to use from several threads.

    Args:
        checkpoint: where the bytes are; the files must be those it was opened from. A pack's source, where it is still
            there, serves as a second copy.
        cache: how reads treat the page cache.
        copies: other directories with the same model, asked in this order when the first fails.
        verify: when an expert from a pack is held against its checksum: "never", at its "first" read, "always".

    Raises:
        StoreError: a copy is of another model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        cache: CacheMode = CacheMode.PAGE_CACHE,
        copies: Sequence[Checkpoint] = (),
        verify: str = "first",
    ) -> None:
        if verify not in VERIFY:
            raise ValueError(f"verify is {verify!r}, not one of {VERIFY}")
        for other in copies:
            if other.shape != checkpoint.shape:
                raise StoreError(f"{other.path} is not the same model as {checkpoint.path}", "Leave it out")
        self.checkpoint = checkpoint
        self.counts = ReadCounts()
        self._cache = cache
        self._verify = verify
        self._copies = [_Copy(c, cache) for c in (checkpoint, *copies)]
        self._source_looked_for = checkpoint.pack is None
        self._components = {
            layer.index: tuple(c for matrix in layer.matrices for c in matrix.components)
            for layer in checkpoint.shape.layers
        }
        self._lock = threading.Lock()

    @property
    def fallbacks(self) -> int:
        """Files that could not be read in the cache mode asked for."""
        return sum(copy.files.fallbacks for copy in self._copies)

    def read_expert(self, layer: int, expert: int, targets: Targets) -> None:
        """Fill `targets` with one expert.

        Args:
            layer: the model's layer number.
            expert: expert number in that layer.
            targets: one writable C-contiguous array for each component, in the order of the layer's matrices and
                components: of the dtype on disk (raw bits), or float32 where the disk has a 16-bit float.

        Raises:
            CheckpointChanged: a file is not the one the checkpoint was opened from, or ends early.
            ChecksumMismatch: the bytes are not those that were packed.
            StoreError: the operating system could not read, or no copy holds the expert.
        """
        self.read_experts(layer, [expert], [targets])

    def read_experts(self, layer: int, experts: Sequence[int], targets: Sequence[Targets]) -> None:
        """Fill several experts of a layer, neighbours on the disk in one system call. Raises as `read_expert`."""
        start = time.perf_counter()
        try:
            self._from(self._copies[0], layer, experts, targets)
        except TitanError as error:
            if not isinstance(error, (StoreError, CheckpointError)):
                raise
            for expert, target in zip(experts, targets, strict=True):
                self._from_any(layer, expert, target, error)
        elapsed = time.perf_counter() - start
        nbytes = len(experts) * sum(c.nbytes for c in self._components[layer])
        with self._lock:
            self.counts.bytes += nbytes
            self.counts.experts += len(experts)
            self.counts.seconds += elapsed

    def read_bytes(self, layer: int, expert: int) -> bytearray:
        """One expert's components as they are on disk, one after another (to send to a worker)."""
        data = bytearray(sum(c.nbytes for c in self._components[layer]))
        parts, offset = [], 0
        for component in self._components[layer]:
            parts.append(
                np.frombuffer(data, DISK_DTYPES[component.dtype][0], int(np.prod(component.shape)), offset).reshape(
                    component.shape
                )
            )
            offset += component.nbytes
        self.read_expert(layer, expert, parts)
        return data

    def close(self) -> None:
        for copy in self._copies:
            copy.files.close()

    def _from_any(self, layer: int, expert: int, targets: Targets, first: TitanError) -> None:
        """One expert after a failure: again from the first copy, then from the others."""
        error = first
        for number, copy in enumerate(self._candidates()):
            if not copy.usable:
                continue
            try:
                self._from(copy, layer, [expert], [targets])
            except (StoreError, CheckpointError) as failure:
                error = failure if number == 0 else error
                continue
            if number:
                with self._lock:
                    self.counts.other_copy += 1
            return
        raise error

    def _candidates(self) -> list[_Copy]:
        with self._lock:
            if not self._source_looked_for:
                self._source_looked_for = True
                source = self._source()
                if source is not None:
                    self._copies.append(_Copy(source, self._cache))
            return list(self._copies)

    def _source(self) -> Checkpoint | None:
        pack = self.checkpoint.pack
        if pack is None or not Path(pack.source).is_dir():
            return None
        try:
            source = open_checkpoint(Path(pack.source))
        except CheckpointError:
            return None
        return source if source.shape == self.checkpoint.shape else None

    def _from(self, copy: _Copy, layer: int, experts: Sequence[int], targets: Sequence[Targets]) -> None:
        if not copy.usable:
            raise StoreError(f"{copy.checkpoint.path} has given wrong bytes before", "Check the disk")
        components = self._components[layer]
        segments: list[Segment] = []
        widened: list[tuple[np.ndarray, ComponentSpec, np.ndarray]] = []
        for expert, target in zip(experts, targets, strict=True):
            for (path, offset), component, view in zip(copy.places(layer, expert), components, target, strict=True):
                bits = view
                if view.nbytes != component.nbytes:
                    bits = np.empty(component.shape, DISK_DTYPES[component.dtype][0])
                    widened.append((bits, component, view))
                segments.append(Segment(path, offset, bits))
        ordered = segments if len(experts) == 1 else sorted(segments, key=lambda s: (s.path, s.offset))
        reads = 0
        for run in runs_of(ordered):
            reads += self._read(copy, run)
        with self._lock:
            self.counts.reads += reads
        if copy.checkpoint.pack is not None and self._verify != "never":
            self._check(copy, layer, experts, segments)
        for bits, component, view in widened:
            widen(bits, component.dtype, view)

    def _read(self, copy: _Copy, run: list[Segment]) -> int:
        try:
            return read_run(copy.files, run)
        except OSError as error:
            failure = error
        if failure.errno == errno.EIO:  # one retry: what a drive could not read at once it may have remapped
            with self._lock:
                self.counts.retries += 1
            log.warning("read failed, trying once more", file=str(run[0].path), offset=run[0].offset)
            try:
                return read_run(copy.files, run)
            except OSError as error:
                failure = error
        nbytes = sum(segment.buffer.nbytes for segment in run)
        raise StoreError(
            f"reading {nbytes} bytes at {run[0].offset} of {run[0].path} failed ({failure.strerror})",
            "Check the disk, or put a healthy copy of the checkpoint in its place",
        ) from failure

    def _check(self, copy: _Copy, layer: int, experts: Sequence[int], segments: list[Segment]) -> None:
        each = len(segments) // len(experts)
        for number, expert in enumerate(experts):
            if self._verify == "first" and (layer, expert) in copy.verified:
                continue
            crc = 0
            for segment in segments[number * each : (number + 1) * each]:
                crc = zlib.crc32(segment.buffer, crc)  # type: ignore[arg-type]  # a contiguous array is a buffer
            if crc != copy.checksum(layer, expert):
                copy.usable = False
                with self._lock:
                    self.counts.mismatches += 1
                log.error(
                    "checksum mismatch: this copy is not used any more",
                    path=str(copy.checkpoint.path),
                    layer=layer,
                    expert=expert,
                )
                raise ChecksumMismatch(
                    f"expert {expert} of layer {layer} in {segments[number * each].path} is not what was packed",
                    "Check the disk and pack the checkpoint again",
                )
            copy.verified.add((layer, expert))
