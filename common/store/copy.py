"""One directory with the experts of a model: where each lies, and whether what it gives can be trusted and waited for.

Knows offsets, checksums and who is reading; not how reads are made, nor what else has the same experts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan.common.errors import ChecksumMismatch, DiskStalled, StoreError
from titan.common.log import get_logger
from titan.common.registry.checkpoint import Checkpoint
from titan.common.registry.layout import ComponentRange
from titan.common.store.files import CacheMode, ShardFiles
from titan.common.store.readers import Ticket
from titan.common.store.scatter import MAX_RUN_BYTES, NO_WAIT, Segment

__all__ = ["Copy"]

log = get_logger("store")


class Piece(NamedTuple):
    """Components of an expert that lie one after another in a file; `whole` when they are all of them, in order."""

    path: Path
    offset: int
    nbytes: int
    components: tuple[int, ...]
    whole: bool


class Copy:
    """Safe to use from several threads.

    Attributes:
        usable: False once it has given wrong bytes.
        at_once: whether its files can be asked for what the page cache has, without waiting for a disk.
        reading: jobs that are reading from it now.
    """

    def __init__(self, checkpoint: Checkpoint, mode: CacheMode) -> None:
        self.checkpoint = checkpoint
        self.files = ShardFiles(checkpoint.shards, mode)
        self.usable = True
        self.at_once = mode is CacheMode.PAGE_CACHE and NO_WAIT is not None
        self.reading: set[Ticket] = set()
        self._verified: set[tuple[int, int]] = set()
        self._pieces: dict[tuple[int, int], tuple[Piece, ...]] = {}

    @property
    def stalled(self) -> bool:
        """Whether a read from it was given up and has not ended yet."""
        return bool(self.reading) and any(ticket.abandoned for ticket in tuple(self.reading))

    def require_healthy(self) -> None:
        """Raises StoreError when it has given wrong bytes, DiskStalled while its disk does not answer."""
        if not self.usable:
            raise StoreError(f"{self.checkpoint.path} has given wrong bytes before", "Check the disk")
        if self.stalled:
            raise DiskStalled(
                f"{self.checkpoint.path} is not read while its disk does not answer",
                "Check the disk and its cable; it is used again as soon as it answers",
            )

    def segments(self, layer: int, expert: int, bits: Sequence[np.ndarray]) -> list[Segment]:
        """What to read so that `bits`, an array a component, are filled; ascending in a file.

        Raises StoreError when this copy does not hold the expert.
        """
        pieces = self._pieces.get((layer, expert))
        if pieces is None:
            pieces = self._pieces[layer, expert] = pieces_of(self.ranges(layer, expert))
        return [
            Segment(path, offset, nbytes, bits if whole else [bits[i] for i in components])
            for path, offset, nbytes, components, whole in pieces
        ]

    def ranges(self, layer: int, expert: int) -> tuple[ComponentRange, ...]:
        """Raises StoreError when this copy does not hold the expert."""
        try:
            return self.checkpoint.ranges(layer, expert)
        except KeyError as error:
            raise StoreError(
                f"expert {expert} of layer {layer} is not in {self.checkpoint.path}, a pack of some experts",
                "Pack it too, or keep the whole checkpoint beside the pack",
            ) from error

    def check(self, layer: int, expert: int, bits: Sequence[np.ndarray], *, always: bool) -> None:
        """Hold what was read against the pack's checksum, the first time or `always`; other checkpoints have none.

        Raises:
            ChecksumMismatch: it is not what was packed; this copy is not used any more.
        """
        pack = self.checkpoint.pack
        if pack is None or (not always and (layer, expert) in self._verified):
            return
        crc = 0
        for component in bits:
            crc = zlib.crc32(component, crc)  # type: ignore[arg-type]  # a contiguous array is a buffer
        if crc == pack.checksums[layer][expert]:
            self._verified.add((layer, expert))
            return
        self.usable = False
        path = self.ranges(layer, expert)[0].file
        log.error("checksum mismatch: this copy is not used any more", file=str(path), layer=layer, expert=expert)
        raise ChecksumMismatch(
            f"expert {expert} of layer {layer} in {path} is not what was packed",
            "Check the disk and pack the checkpoint again",
        )


def pieces_of(ranges: Sequence[ComponentRange]) -> tuple[Piece, ...]:
    """An expert's components put together where they touch, ascending in a file; at most MAX_RUN_BYTES a piece."""
    order = sorted(range(len(ranges)), key=lambda i: (ranges[i].file, ranges[i].offset))
    groups: list[list[int]] = []
    nbytes = 0
    for i in order:
        part, last = ranges[i], ranges[groups[-1][-1]] if groups else None
        touches = last is not None and part.file == last.file and part.offset == last.offset + last.nbytes
        if touches and nbytes + part.nbytes <= MAX_RUN_BYTES:
            groups[-1].append(i)
        else:
            groups.append([i])
            nbytes = 0
        nbytes += part.nbytes
    whole = groups == [list(range(len(ranges)))]
    return tuple(
        Piece(ranges[g[0]].file, ranges[g[0]].offset, sum(ranges[i].nbytes for i in g), tuple(g), whole) for g in groups
    )
