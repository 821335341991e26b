"""One MoE layer's experts on one node: slot table, the memory behind it, and where missing ones are read from.

Demand loading happens here: what is not in a slot is read from the store before the kernel runs. Belongs to the
thread that owns MLX. Knows nothing of other nodes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from titan.common.errors import DiskStalled, MemoryBudgetError, TitanError
from titan.common.execution import SORT_AT_PAIRS, apply_pairs, apply_rows
from titan.common.pair_groups import PairGroups
from titan.common.prefetch.incoming import Incoming
from titan.common.slots import EvictionPolicy, SlotTable
from titan.common.slots.buffers import LayerBuffers
from titan.common.slots.overdue import OverdueSlots
from titan.common.store.layer_reads import Fill, FillCached, FillMany, LayerReads
from titan.common.store.readers import ReaderPool


class ExpertLayer:
    """Executes any experts of a layer with the slots it has.

    Args:
        buffers: slots of the layer.
        fill: reads one expert into given views.
        policy: whom to evict.
        readers: who reads, so that nothing waits for a disk without a deadline; without them this thread does.
        fill_many: reads several experts, neighbours in one call; by default one after another.
        fill_cached: reads on this thread what can be had without waiting; by default that is nothing.
        overlap: run the experts that are there while the others are read.
    """

    def __init__(
        self,
        buffers: LayerBuffers,
        fill: Fill,
        policy: EvictionPolicy | None = None,
        readers: ReaderPool | None = None,
        *,
        fill_many: FillMany | None = None,
        fill_cached: FillCached | None = None,
        overlap: bool = False,
    ) -> None:
        self.buffers = buffers
        self.table = SlotTable(buffers.capacity, policy)
        self.whole = False  # every expert pinned, expert e in slot e: the router's indices are slot ids
        self.overlap = overlap
        self.overdue = OverdueSlots(self.table)
        self._fill, self._fill_many, self._fill_cached = fill, fill_many, fill_cached
        self._reads = LayerReads(buffers.layer, fill, fill_many, fill_cached, readers)
        self.incoming: Incoming | None = None
        if readers is not None:
            self.incoming = Incoming(buffers, self.table, fill, readers, self.settle, self.overdue)
        self._index = buffers.layer.index
        self._unevaluated: list[mx.array] = []

    def pin(self, experts: Iterable[int]) -> None:
        """Read `experts` into slots that are never evicted."""
        missing = [e for e in experts if e not in self.table.slots]
        self.settle()
        self._load(missing, keep=missing, pin=True)

    def preload(self, experts: Sequence[int]) -> None:
        """Read as many of `experts`, the first first, as free slots take; they may be evicted like any others."""
        self.settle()
        self.overdue.regain()
        wanted = [e for e in experts if e not in self.table.slots][: self.table.free_slots]
        self._load(wanted[::-1], keep=wanted, install=True)  # the last to come in is the last to go

    def adopt(self, other: ExpertLayer, experts: Sequence[int], *, pin: bool = False) -> None:
        """Copy those of `experts` that are in a slot of `other`, a table of the same layer, as free slots last."""
        other.settle()
        self.settle()
        there = [e for e in experts if e in other.table.slots and e not in self.table.slots][: self.table.free_slots]
        there.reverse()
        slots = self.table.reserve(there, ()) or []
        for expert, slot in zip(there, slots, strict=True):
            self.buffers.copy_slot(slot, other.buffers, other.table.slots[expert])
            self.table.map(expert, pin=pin)
        self.table.counts.installed += len(there)

    def heir(self, buffers: LayerBuffers) -> ExpertLayer:
        """Other slots for the same layer, empty, read from the same place; what was learned and counted goes on."""
        policy = self.table.policy.emptied()
        heir = ExpertLayer(
            buffers,
            self._fill,
            policy,
            self._reads.pool,
            fill_many=self._fill_many,
            fill_cached=self._fill_cached,
            overlap=self.overlap,
        )
        heir.table.counts, heir.table.uses = self.table.counts, self.table.uses
        return heir

    def pin_all(self, num_experts: int) -> None:
        """Read every expert, expert e into slot e: no lookup and no synchronisation are needed from then on."""
        self.pin(range(num_experts))
        self.whole = all(self.table.slots[e] == e for e in range(num_experts))

    def settle(self) -> None:
        """Evaluate what earlier calls left lazy: a slot that an unevaluated graph reads must not be overwritten."""
        if self._unevaluated:
            mx.eval(self._unevaluated)
            self._unevaluated = []

    @property
    def unevaluated(self) -> list[mx.array] | None:
        """Outputs that may not have been evaluated yet; None when there are none."""
        return self._unevaluated or None

    def forget_unevaluated(self) -> None:
        """The caller has evaluated `unevaluated`."""
        self._unevaluated = []

    def run_rows(self, x: mx.array, experts: np.ndarray) -> mx.array:
        """x: [N, D], experts: [N, K] -> [N, K, D], lazily where the experts fit."""
        chosen = experts.tolist()
        distinct = list(dict.fromkeys(chosen[0] if len(chosen) == 1 else [e for row in chosen for e in row]))
        slots = self.table.slots
        if self._fits(distinct):
            missing = self._enter(distinct)
            if not missing or not self._overlaps(missing, distinct):
                if missing:
                    self.settle()
                    self._load(missing, keep=distinct)
                y = apply_rows(self.buffers, x, mx.array([[slots[e] for e in row] for row in chosen], mx.uint32))
                self._unevaluated.append(y)
                return y
        else:
            missing = self._enter(distinct)
        rows = np.repeat(np.arange(experts.shape[0], dtype=np.uint32), experts.shape[1])
        flat = experts.reshape(-1)
        return self._run(x, rows, flat, distinct, missing, flat.size >= SORT_AT_PAIRS).reshape(*experts.shape, -1)

    def run_pairs(self, x: mx.array, rows: np.ndarray, experts: np.ndarray, *, sort: bool) -> mx.array:
        """One output a pair: x: [R, D], rows and experts: [P] -> [P, D].

        When the distinct experts exceed the slots, the pairs are executed expert group by expert group: every expert
        is read once, and pairs are independent, so the result is the same.
        """
        distinct = list(dict.fromkeys(experts.tolist()))
        return self._run(x, rows, experts, distinct, self._enter(distinct), sort)

    def _run(
        self, x: mx.array, rows: np.ndarray, experts: np.ndarray, distinct: list[int], missing: list[int], sort: bool
    ) -> mx.array:
        width = self.table.evictable_slots
        fits = self._fits(distinct)
        if fits and not self._overlaps(missing, distinct):
            if missing:
                self.settle()
                self._load(missing, keep=distinct)
            y = apply_pairs(self.buffers, x, rows, self._slots_of(experts), sort=sort)
            self._unevaluated.append(y)
            return y
        if width == 0:
            raise self._no_slots("has no slot left for experts that are not pinned")
        self.settle()
        pairs = PairGroups(x, rows, experts, sort=sort)
        self._run_grouped(pairs, distinct if fits else [])
        y = pairs.joined()
        self._unevaluated.append(y)
        return y

    def _run_grouped(self, pairs: PairGroups, keep: list[int]) -> None:
        """What is there first; then group after group is read into slots whose experts have been computed.

        A group is no more experts than are read at once: the disk waits for the first one to be computed, and the last
        one for the disk. Those that the last rows chose come last, and so are still there for the next token.

        keep: experts that all have their place; without them only those that are not computed yet are kept.
        """
        order = list(dict.fromkeys(reversed(pairs.experts.tolist())))[::-1]
        here = [e for e in order if e in self.table.slots]
        missing = [e for e in order if e not in self.table.slots]
        width = self.table.evictable_slots
        size = width if keep else max(1, min(width // 2, self._reads.at_once or width))
        computing: deque[tuple[list[int], mx.array]] = deque()
        for group in [part[i : i + size] for part in (here, missing) for i in range(0, len(part), size)]:
            if group[0] not in self.table.slots:
                busy = [e for experts, _ in computing for e in experts]
                while not keep and computing and not self._fits([*busy, *group]):
                    experts, y = computing.popleft()
                    mx.eval(y)
                    busy = busy[len(experts) :]
                self._load(group, keep=keep or [*busy, *group])
            y = pairs.apply(self.buffers, self._places(group))
            self._unevaluated.append(y)
            computing.append((group, y))

    def _fits(self, distinct: list[int]) -> bool:
        if len(distinct) <= self.table.evictable_slots:
            return True
        pinned = self.table.pinned
        return sum(e not in pinned for e in distinct) <= self.table.evictable_slots

    def _overlaps(self, missing: list[int], distinct: list[int]) -> bool:
        return self.overlap and 0 < len(missing) < len(distinct)

    def _enter(self, distinct: list[int]) -> list[int]:
        """The router has chosen: take in what a prefetch brought; returns what is missing.

        What is missing beside an expert that a prefetch is still reading is read meanwhile.
        """
        if self.overdue:
            self.overdue.regain()
        late = self.incoming.land(distinct) if self.incoming else []
        missing = self.table.look_up(distinct, late)
        if not self.incoming or not late:
            return missing
        if missing and self._fits(distinct):
            self.settle()
            try:
                self._load(missing, keep=distinct)
            except DiskStalled:
                self.incoming.give_up(late)
                raise
        self.incoming.wait_for(late)
        return [e for e in distinct if e not in self.table.slots]

    def _load(self, missing: Sequence[int], keep: Sequence[int], *, pin: bool = False, install: bool = False) -> None:
        """Read `missing` into slots whose experts are not in `keep`; the caller has settled what reads them."""
        if not missing:
            return
        start = time.perf_counter()
        kept = frozenset(keep)
        try:
            missing = self._fill_slots(missing, kept)
        except DiskStalled as error:  # another copy may have it; other slots, as these may still be written
            try:
                missing = self._fill_slots(missing, kept)
            except DiskStalled:
                raise error from None
        for expert in missing:
            self.table.map(expert, pin=pin)
        counts, took_s = self.table.counts, time.perf_counter() - start
        if pin or install:
            counts.installed += len(missing)
            counts.install_s += took_s
        else:
            counts.stall_s += took_s

    def _fill_slots(self, missing: Sequence[int], kept: frozenset[int]) -> Sequence[int]:
        """Reserve and fill a slot each for those of `missing` that are in none; returns them."""
        self._reads.require_disk()
        slots = self.table.reserve(missing, kept)
        if slots is None and (self.incoming or self.overdue):
            self.overdue.regain()
            if self.incoming:
                self.incoming.clear()
            missing = [e for e in missing if e not in self.table.slots]
            slots = self.table.reserve(missing, kept)
        if slots is None:
            raise self._no_slots(f"has {self.table.capacity} slots, too few for {len(missing)} more experts")
        try:
            self._reads.read(missing, [self.buffers.targets(slot) for slot in slots], self.overdue.add)
        except BaseException:
            for expert in missing:
                if expert in self.table.reserved:
                    self.table.release(expert)
            raise
        return missing

    def _no_slots(self, why: str) -> TitanError:
        if self.overdue:
            return DiskStalled(
                f"layer {self._index} has no slots: {len(self.overdue)} wait for a disk that does not answer",
                "Check the disk and its cable; it is used again as soon as it answers",
            )
        return MemoryBudgetError(f"layer {self._index} {why}", "Raise coordinator.memory, or a worker's --memory")

    def _places(self, experts: Sequence[int]) -> dict[int, int]:
        return {e: self.table.slots[e] for e in experts}

    def _slots_of(self, experts: np.ndarray) -> np.ndarray:
        slots = self.table.slots
        return np.array([slots[e] for e in experts.tolist()], np.uint32)
