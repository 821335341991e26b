"""One MoE layer's experts on one node: slot table, the memory behind it, and where missing ones are read from.

Demand loading happens here: what is not in a slot is read from the store before the kernel runs. Belongs to the
thread that owns MLX. Knows nothing of other nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

import mlx.core as mx
import numpy as np

from titan.common.errors import MemoryBudgetError
from titan.common.execution import apply_pairs, apply_rows
from titan.common.slots import EvictionPolicy, SlotTable
from titan.common.slots.buffers import LayerBuffers

# fill(layer, expert, targets): see ExpertStore.read_expert
Fill = Callable[[int, int, Sequence[np.ndarray]], None]

PARALLEL_READ_BYTES = 256 << 10  # smaller experts are read before a thread would have woken up


class ExpertLayer:
    """Executes any experts of a layer with the slots it has.

    Args:
        buffers: slots of the layer.
        fill: reads one expert into given views.
        policy: whom to evict.
        readers: pool for reading several experts at once.
    """

    def __init__(
        self,
        buffers: LayerBuffers,
        fill: Fill,
        policy: EvictionPolicy | None = None,
        readers: Executor | None = None,
    ) -> None:
        self.buffers = buffers
        self.table = SlotTable(buffers.capacity, policy)
        self.whole = False  # every expert pinned, expert e in slot e: the router's indices are slot ids
        self._index = buffers.layer.index
        self._fill = fill
        self._readers = readers if buffers.layer.expert_bytes >= PARALLEL_READ_BYTES else None
        self._unevaluated: list[mx.array] = []

    def pin(self, experts: Iterable[int]) -> None:
        """Read `experts` into slots that are never evicted."""
        missing = [e for e in experts if e not in self.table.slots]
        self._load(missing, keep=missing, pin=True)

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
        distinct = _distinct(experts)
        if not self._fits(distinct):
            rows = np.repeat(np.arange(experts.shape[0], dtype=np.uint32), experts.shape[1])
            flat = experts.reshape(-1)
            return self.run_pairs(x, rows, flat, sort=flat.size >= 64).reshape(*experts.shape, -1)
        self._ensure(distinct)
        y = apply_rows(self.buffers, x, mx.array(self._slots_of(experts)))
        self._unevaluated.append(y)
        return y

    def run_pairs(self, x: mx.array, rows: np.ndarray, experts: np.ndarray, *, sort: bool) -> mx.array:
        """One output a pair: x: [R, D], rows and experts: [P] -> [P, D].

        When the distinct experts exceed the slots, the pairs are executed expert group by expert group: every expert
        is read once, and pairs are independent, so the result is the same.
        """
        distinct = _distinct(experts)
        if self._fits(distinct):
            self._ensure(distinct)
            y = apply_pairs(self.buffers, x, rows, self._slots_of(experts), sort=sort)
            self._unevaluated.append(y)
            return y
        missing = self.table.look_up(distinct)
        here = [e for e in distinct if e in self.table.slots]
        width = self.table.evictable_slots
        if width == 0:
            raise MemoryBudgetError(
                f"layer {self._index} has no slot left for experts that are not pinned", "raise coordinator.memory"
            )
        outputs, positions = [], []
        for group in ([here] if here else []) + [missing[i : i + width] for i in range(0, len(missing), width)]:
            if group is not here:
                self._load(group, keep=group)
            chosen = np.flatnonzero(np.isin(experts, group))
            y = apply_pairs(self.buffers, x, rows[chosen], self._slots_of(experts[chosen]), sort=sort)
            self._unevaluated.append(y)
            outputs.append(y)
            positions.append(chosen)
        order = np.argsort(np.concatenate(positions)).astype(np.uint32)
        y = mx.concatenate(outputs)[mx.array(order)]
        self._unevaluated.append(y)
        return y

    def _fits(self, distinct: list[int]) -> bool:
        if len(distinct) <= self.table.evictable_slots:
            return True
        pinned = self.table.pinned
        return sum(e not in pinned for e in distinct) <= self.table.evictable_slots

    def _ensure(self, distinct: list[int]) -> None:
        missing = self.table.look_up(distinct)
        if missing:
            self._load(missing, keep=distinct)

    def _load(self, missing: Sequence[int], keep: Sequence[int], *, pin: bool = False) -> None:
        self.settle()
        start = time.perf_counter()
        slots = self.table.reserve(missing, frozenset(keep))
        if slots is None:
            raise MemoryBudgetError(
                f"layer {self._index} has {self.table.capacity} slots, too few for {len(missing)} more experts",
                "raise the node's memory",
            )
        try:
            if self._readers is not None and len(missing) > 1:
                jobs = [
                    self._readers.submit(self._fill, self._index, expert, self.buffers.targets(slot))
                    for expert, slot in zip(missing, slots, strict=True)
                ]
                errors = [error for job in jobs if (error := job.exception()) is not None]
                if errors:
                    raise errors[0]
            else:
                for expert, slot in zip(missing, slots, strict=True):
                    self._fill(self._index, expert, self.buffers.targets(slot))
        except BaseException:
            for expert in missing:
                self.table.release(expert)
            raise
        for expert in missing:
            self.table.map(expert, pin=pin)
        self.table.counts.stall_s += time.perf_counter() - start

    def _slots_of(self, experts: np.ndarray) -> np.ndarray:
        slots = self.table.slots
        return np.array([slots[e] for e in experts.reshape(-1).tolist()], np.uint32).reshape(experts.shape)


def _distinct(experts: np.ndarray) -> list[int]:
    """Distinct experts in the order of first use."""
    return list(dict.fromkeys(experts.reshape(-1).tolist()))
