"""The SSD tier: reads experts at their offsets, straight into the memory they will live in.

Knows where bytes are (a checkpoint's ranges), what to do when a copy of them fails, and how reads are accounted;
nothing of slots, plans or networks.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan.common.arrays import DISK_DTYPES, widen
from titan.common.errors import CheckpointError, ChecksumMismatch, StoreError, TitanError
from titan.common.log import get_logger
from titan.common.registry.checkpoint import Checkpoint, open_checkpoint
from titan.common.registry.shape import ComponentSpec
from titan.common.store.copy import Copy
from titan.common.store.files import CacheMode
from titan.common.store.readers import current_ticket
from titan.common.store.scatter import Segment, read_at_once, read_run, runs_of

__all__ = ["ExpertStore", "ReadCounts"]

log = get_logger("store")

Targets = Sequence[np.ndarray]
Widened = list[tuple[np.ndarray, ComponentSpec, np.ndarray]]  # (raw bits, what they are, where they go)
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
        at_once: of the experts those that the page cache had when `read_cached` asked it.
        cannot_ask: copies whose file system does not answer that: all their experts are read by the pool.
    """

    bytes: int = 0
    reads: int = 0
    experts: int = 0
    seconds: float = 0.0
    retries: int = 0
    other_copy: int = 0
    mismatches: int = 0
    at_once: int = 0
    cannot_ask: int = 0


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
        self._copies = [Copy(c, cache) for c in (checkpoint, *copies)]
        self._source_looked_for = checkpoint.pack is None
        self._components = {
            layer.index: tuple(c for matrix in layer.matrices for c in matrix.components)
            for layer in checkpoint.shape.layers
        }
        self._expert_bytes = {layer.index: layer.expert_bytes for layer in checkpoint.shape.layers}
        self._lock = threading.Lock()
        self._looking = threading.Lock()

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
            reads = self._from(self._copies[0], layer, experts, targets)
        except (StoreError, CheckpointError) as error:
            reads = sum(self._from_any(layer, e, target, error) for e, target in zip(experts, targets, strict=True))
        self._count(layer, len(experts), reads, start)

    def read_cached(self, layer: int, experts: Sequence[int], targets: Sequence[Targets]) -> list[int]:
        """Fill what can be had without waiting for a disk: what the page cache has, where the system can be asked that.

        Returns the places in `experts` of the others, for `read_experts` on a thread that may wait; whatever is wrong
        with them comes to light there.

        Raises:
            DiskStalled: no copy answers at the moment; also without any `experts`, before room is made for them.
        """
        copy = self._copies[0]
        if copy.stalled and self._source_looked_for and all(c.stalled or not c.usable for c in self._copies):
            copy.require_healthy()
        if not copy.at_once or not copy.usable or copy.stalled:
            return list(range(len(experts)))
        start = time.perf_counter()
        rest = [i for i, e in enumerate(experts) if not self._at_once(copy, layer, e, targets[i])]
        done = len(experts) - len(rest)
        self._count(layer, done, done, start, at_once=done)
        return rest

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

    def _count(self, layer: int, experts: int, reads: int, start_s: float, *, at_once: int = 0) -> None:
        elapsed_s = time.perf_counter() - start_s
        counts = self.counts
        with self._lock:
            counts.bytes += experts * self._expert_bytes[layer]
            counts.experts += experts
            counts.reads += reads
            counts.seconds += elapsed_s
            counts.at_once += at_once

    def _from_any(self, layer: int, expert: int, targets: Targets, first: TitanError) -> int:
        """One expert after a failure: again from the first copy, then from the others. Returns the system calls."""
        error = first
        for number, copy in enumerate(self._candidates()):
            if _given_up():
                break
            try:
                reads = self._from(copy, layer, [expert], [targets])
            except (StoreError, CheckpointError) as failure:
                error = failure if number == 0 and copy.usable else error
                continue
            if number:
                with self._lock:
                    self.counts.other_copy += 1
            return reads
        raise error

    def _candidates(self) -> list[Copy]:
        with self._looking:  # not the lock of the counts: this may wait for a disk
            if not self._source_looked_for:
                source = self._source()
                if source is not None:
                    self._copies.append(Copy(source, self._cache))
                self._source_looked_for = True
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

    def _from(self, copy: Copy, layer: int, experts: Sequence[int], targets: Sequence[Targets]) -> int:
        """Fill experts from one copy; returns the system calls it took."""
        copy.require_healthy()
        ticket = current_ticket()
        if ticket is not None:
            copy.reading.add(ticket)
        try:
            widened: Widened = []
            bits = [self._bits(layer, target, widened) for target in targets]
            segments = [s for expert, b in zip(experts, bits, strict=True) for s in copy.segments(layer, expert, b)]
            if len(experts) > 1:
                segments.sort(key=_place)
            reads = 0
            for run in runs_of(segments) if len(segments) > 1 else (segments,):
                if ticket is not None:
                    ticket.file = run[0].path
                reads += self._read(copy, run)
        finally:
            if ticket is not None:
                copy.reading.discard(ticket)
        for expert, b in zip(experts, bits, strict=True):
            self._check(copy, layer, expert, b)
        for b, component, view in widened:
            widen(b, component.dtype, view)
        return reads

    def _at_once(self, copy: Copy, layer: int, expert: int, target: Targets) -> bool:
        widened: Widened = []
        bits = self._bits(layer, target, widened)
        try:
            for segment in copy.segments(layer, expert, bits):
                file = copy.files.opened(segment.path)
                if file is None or not read_at_once(file.fd, segment):
                    return False
            self._check(copy, layer, expert, bits)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP and copy.at_once:
                copy.at_once = False
                self.counts.cannot_ask += 1
                log.info("this file system cannot be asked what is cached", path=str(copy.checkpoint.path))
            return False
        except (StoreError, CheckpointError):
            return False
        for b, component, view in widened:
            widen(b, component.dtype, view)
        return True

    def _bits(self, layer: int, target: Targets, widened: Widened) -> Targets:
        """Where the disk's own bytes go: the target, or an array beside it for what is widened afterwards."""
        if sum([view.nbytes for view in target]) == self._expert_bytes[layer]:
            return target
        bits: list[np.ndarray] = []
        for component, view in zip(self._components[layer], target, strict=True):
            bits.append(view)
            if view.nbytes != component.nbytes:
                bits[-1] = np.empty(component.shape, DISK_DTYPES[component.dtype][0])
                widened.append((bits[-1], component, view))
        return bits

    def _read(self, copy: Copy, run: list[Segment]) -> int:
        try:
            return read_run(copy.files, run)
        except OSError as error:
            failure = error
        if failure.errno == errno.EIO and not _given_up():  # a drive may have remapped what it could not read at once
            with self._lock:
                self.counts.retries += 1
            log.warning("read failed, trying once more", file=str(run[0].path), offset=run[0].offset)
            try:
                return read_run(copy.files, run)
            except OSError as error:
                failure = error
        nbytes = sum(segment.nbytes for segment in run)
        raise StoreError(
            f"reading {nbytes} bytes at {run[0].offset} of {run[0].path} failed ({failure.strerror})",
            "Check the disk, or put a healthy copy of the checkpoint in its place",
        ) from failure

    def _check(self, copy: Copy, layer: int, expert: int, bits: Targets) -> None:
        if self._verify == "never":
            return
        try:
            copy.check(layer, expert, bits, always=self._verify == "always")
        except ChecksumMismatch:
            with self._lock:
                self.counts.mismatches += 1
            raise


def _place(segment: Segment) -> tuple[Path, int]:
    return segment.path, segment.offset


def _given_up() -> bool:
    """Whether nobody waits any more for the job that this thread runs."""
    ticket = current_ticket()
    return ticket is not None and ticket.abandoned
