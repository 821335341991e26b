"""A prompt's layer read past its slots: section by section into two buffers, one computed on while the other fills.

While the last section of a layer is computed, the first of the next layer is being read. Belongs to the thread that
owns MLX; only the reads happen elsewhere. Knows no workers and no slot tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import mlx.core as mx
import numpy as np

from titan.common.errors import DiskStalled, TitanError
from titan.common.log import get_logger
from titan.common.pair_groups import PairGroups
from titan.common.registry.shape import LayerSpec
from titan.common.slots.buffers import LayerBuffers
from titan.common.store.readers import ReaderPool, Ticket
from titan.common.stream.rates import ReadRates
from titan.common.stream.sections import sections

__all__ = ["LayerStream"]

log = get_logger("stream")

AHEAD_COVERAGE = 0.75  # of what a layer lacks; below it a prompt's next layer is not read before its router has spoken

FillMany = Callable[[int, Sequence[int], Sequence[Sequence[np.ndarray]]], None]
# Of a layer: the experts that this machine would have to read for it.
Absent = Callable[[int], list[int]]


@dataclass(slots=True)
class _Flight:
    """A section under way into a side's buffers."""

    layer: int
    experts: list[int]
    side: int
    start_s: float
    end_s: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)


class LayerStream:
    """Two buffers of `width` experts each, for all layers of one shape.

    Args:
        buffers: equal ones; what they take is part of this node's M_n.
        fill_many: see ExpertStore.read_experts.
        readers: who reads.
        order: the layers in the order they run.
        absent: see Absent.
    """

    def __init__(
        self,
        buffers: tuple[LayerBuffers, LayerBuffers],
        fill_many: FillMany,
        readers: ReaderPool,
        order: Sequence[int],
        absent: Absent,
    ) -> None:
        self.width = buffers[0].capacity
        self.nbytes = sum(b.nbytes for b in buffers)
        self.rates = ReadRates()
        self.waited_s = 0.0
        self.wasted = 0  # experts read ahead for a layer that did not come
        self._buffers = buffers
        self._fill_many = fill_many
        self._readers = readers
        self._next = dict(pairwise(order))
        self._absent = absent
        self._flights: list[_Flight | None] = [None, None]
        self._busy: list[mx.array | None] = [None, None]  # what may still read a side
        self._overdue: list[Ticket] = []  # reads that were given up and may still write

    def pays(self, layer: LayerSpec, missing: Sequence[int]) -> bool:
        """Whether `missing` experts of a layer should come through here."""
        self._overdue = [ticket for ticket in self._overdue if ticket.writes]
        if self._overdue or layer.matrices != self._buffers[0].layer.matrices:
            return False
        if any(flight is not None and flight.layer == layer.index for flight in self._flights):
            return True
        read = sum(map(len, sections(missing, self.width, layer.expert_bytes)))
        return self.rates.sequential_pays(len(missing), read)

    def run(
        self, layer: LayerSpec, pairs: PairGroups, missing: Sequence[int]
    ) -> Iterator[tuple[list[int], LayerBuffers]]:
        """Apply `missing` experts to their pairs, section by section.

        Yields a section's experts and the buffers with the i-th of them in slot i, to be read until the next is asked
        for.

        Raises:
            StoreError, CheckpointError: a section could not be read; the buffers are free again.
            DiskStalled: a read does not end; nothing is read this way until it has.
        """
        index = layer.index
        needed = frozenset(missing)
        coverage = len(missing) / max(1, len(self._absent(index)))
        flight = self._arrived(index)
        here = frozenset() if flight is None else frozenset(flight.experts)
        queue = sections((e for e in missing if e not in here), self.width, layer.expert_bytes)
        if flight is None:  # a small one first: nothing is computed while it is read
            first = self._readers.width
            queue[:1] = [part for part in (queue[0][:first], queue[0][first:]) if part]
            flight = self._begin(index, queue.pop(0), 0)
            self._finish(flight)
        while flight is not None:
            buffers = self._buffers[flight.side]
            places = {e: i for i, e in enumerate(flight.experts) if e in needed}
            if places:
                self._busy[flight.side] = pairs.apply(buffers, places)
            following = self._begin(index, queue.pop(0), 1 - flight.side) if queue else None
            if following is None and coverage >= AHEAD_COVERAGE:
                self._read_ahead(index, 1 - flight.side)
            yield flight.experts, buffers
            if following is not None:
                self._finish(following)
            flight = following

    def close(self) -> None:
        """Let go of what is under way."""
        for side in (0, 1):
            self._clear(side)

    def _read_ahead(self, index: int, side: int) -> None:
        ahead = self._next.get(index)
        absent = [] if ahead is None else self._absent(ahead)
        if ahead is not None and len(absent) > self.width // 2:
            self._begin(ahead, absent[: self.width], side)

    def _arrived(self, index: int) -> _Flight | None:
        """The section of this layer that was read ahead; what failed is read again by whoever needs it."""
        for side, flight in enumerate(self._flights):
            if flight is not None and flight.layer == index:
                try:
                    self._finish(flight)
                except DiskStalled:
                    raise
                except TitanError as error:
                    log.debug("reading ahead failed", layer=index, error=str(error))
                    continue
                return flight
            self._clear(side)
        return None

    def _begin(self, index: int, experts: list[int], side: int) -> _Flight:
        self._clear(side)
        if self._busy[side] is not None:
            mx.eval(self._busy[side])
            self._busy[side] = None
        buffers = self._buffers[side]
        flight = _Flight(index, experts, side, time.perf_counter())
        jobs = min(len(experts), self._readers.width)
        cuts = [len(experts) * i // jobs for i in range(jobs + 1)]

        def read(first: int, end: int) -> None:
            self._fill_many(index, experts[first:end], [buffers.targets(i) for i in range(first, end)])
            flight.end_s = time.perf_counter()

        flight.tickets = self._readers.begin([lambda a=a, b=b: read(a, b) for a, b in pairwise(cuts)])
        self._flights[side] = flight
        return flight

    def _finish(self, flight: _Flight) -> None:
        """Wait for a section; raises what its reads raised."""
        self._flights[flight.side] = None
        start = time.perf_counter()
        try:
            self._readers.finish(flight.tickets)
        except DiskStalled:
            self._overdue += flight.tickets
            raise
        self.waited_s += time.perf_counter() - start
        self.rates.read_sequentially(len(flight.experts), flight.end_s - flight.start_s)

    def _clear(self, side: int) -> None:
        """Nobody wants what is on its way to a side: wait until nothing is written there."""
        flight, self._flights[side] = self._flights[side], None
        if flight is None:
            return
        begun = [ticket for ticket in flight.tickets if not ticket.cancel()]
        try:
            self._readers.wait_done(begun)
        except DiskStalled:
            self._overdue += begun
            raise
        self.wasted += len(flight.experts)
