"""How one layer's missing experts are read: what needs no disk by the thread that asks, the rest by the readers.

So the thread that asks never waits without a deadline. Knows experts and buffers, no slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from titan.common.registry.shape import LayerSpec
from titan.common.store.readers import ReaderPool, Ticket
from titan.common.store.scatter import MAX_RUN_BYTES

__all__ = ["Fill", "FillCached", "FillMany", "LayerReads"]

# fill(layer, expert, targets): see ExpertStore.read_expert
Fill = Callable[[int, int, Sequence[np.ndarray]], None]
# fill_many(layer, experts, targets): see ExpertStore.read_experts
FillMany = Callable[[int, Sequence[int], Sequence[Sequence[np.ndarray]]], None]
# fill_cached(layer, experts, targets) -> places of those that are still to be filled; raises DiskStalled while nothing
# can be read, also without experts: see ExpertStore.read_cached
FillCached = Callable[[int, Sequence[int], Sequence[Sequence[np.ndarray]]], Sequence[int]]
# unended(event, experts): the targets of `experts` may be written until `event` is set
Unended = Callable[[threading.Event, Sequence[int]], None]

PARALLEL_READ_BYTES = 256 << 10  # smaller cached experts are copied before a reader would have woken up


class LayerReads:
    """Reads of one layer.

    Args:
        fill: reads one expert.
        fill_many: reads several; by default one after another.
        fill_cached: reads what can be had without waiting; by default that is nothing.
        pool: who reads the rest; without one, the thread that asks does, however long it takes.

    Attributes:
        at_once: experts that are read at a time; None where that is no matter of readers.
    """

    def __init__(
        self,
        layer: LayerSpec,
        fill: Fill,
        fill_many: FillMany | None = None,
        fill_cached: FillCached | None = None,
        pool: ReaderPool | None = None,
    ) -> None:
        self.pool = pool
        self._layer, self._nbytes = layer.index, layer.expert_bytes
        self._fill = fill
        self._fill_many = fill_many or self._one_by_one
        self._fill_cached = fill_cached
        self.at_once = pool.width + 1 if pool is not None and self._nbytes >= PARALLEL_READ_BYTES else None

    def require_disk(self) -> None:
        """Raises DiskStalled while nothing can be read: before room is made for it."""
        if self._fill_cached is not None:
            self._fill_cached(self._layer, (), ())

    def read(self, experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]], unended: Unended) -> None:
        """Fill the targets of `experts`.

        Args:
            unended: told which targets may still be written, before an error is raised.

        Raises:
            DiskStalled: a read has not ended within the pool's deadline.
            StoreError, CheckpointError: the first that a read raised.
        """
        pool = self.pool
        if pool is None:
            self._fill_many(self._layer, experts, targets)
            return
        begun: list[tuple[Sequence[int], Ticket]] = []

        def hand_over(places: Sequence[int]) -> None:
            parts = [places[a:b] for a, b in pairwise(self._cuts(len(places), pool.width))]
            jobs = [self._job([experts[i] for i in part], [targets[i] for i in part]) for part in parts]
            begun.extend(zip(parts, pool.begin(jobs), strict=True))

        try:
            order = sorted(range(len(experts)), key=experts.__getitem__)  # neighbours stay together
            mine = len(order)  # experts that are looked for in the page cache here
            if mine > 1 and self._nbytes >= PARALLEL_READ_BYTES:
                mine = max(1, mine // (pool.width + 1))
                hand_over(order[mine:])
            rest = self._cached(order[:mine], experts, targets)
            if rest:
                hand_over(rest)
            if begun:
                pool.finish([ticket for _, ticket in begun])
        except BaseException:
            pool.abandon([ticket for _, ticket in begun])
            for places, ticket in begun:
                if ticket.writes:
                    unended(ticket.done, [experts[i] for i in places])
            raise

    def _cached(
        self, places: Sequence[int], experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]]
    ) -> Sequence[int]:
        if self._fill_cached is None:
            return places
        rest = self._fill_cached(self._layer, [experts[i] for i in places], [targets[i] for i in places])
        return [places[i] for i in rest]

    def _cuts(self, count: int, width: int) -> list[int]:
        """Into a job a reader; more when that would make a job of more bytes than a disk reads within a deadline."""
        jobs = min(count, max(width, -(-count * self._nbytes // MAX_RUN_BYTES)))
        return [count * i // jobs for i in range(jobs + 1)] if jobs else []

    def _job(self, experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]]) -> Callable[[], None]:
        return lambda: self._fill_many(self._layer, experts, targets)

    def _one_by_one(self, layer: int, experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]]) -> None:
        for expert, views in zip(experts, targets, strict=True):
            self._fill(layer, expert, views)
