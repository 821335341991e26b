"""The experts a worker holds: per layer a slot table, pinned from a checkpoint or from pushed bytes, and beside the
pinned ones a cache of experts that are read from the worker's disk when they are asked for.

What is to be held is stated whole; what is there already stays. Never more than the budget (constraint (mem)), also
while one set is exchanged for another. Allocation, mapping and execution happen on the MLX thread; installing does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES, from_raw_bits, raw_bits
from titan.common.errors import MemoryBudgetError, TitanError, WorkerRefused
from titan.common.execution import weighted_sums
from titan.common.experts import ExpertLayer
from titan.common.registry.shape import ModelShape
from titan.common.slots.buffers import LayerBuffers, slot_bytes
from titan.common.slots.table import SlotCounts
from titan.common.units import format_bytes
from titan.common.wire.messages import ExecuteCall, ExecuteResult, Hint
from titan.worker.engine import MLXThread
from titan.worker.own_copy import OwnCopy
from titan.worker.share import NO_CACHE, NONE, Cache, Share

TRUSTED_AFTER = 32  # prefetched experts, before their use says anything
MIN_PRECISION = 0.2  # of them must have been chosen, or hints are only sampled
SAMPLED_EVERY = 16


@dataclass(frozen=True, slots=True)
class LayerStep:
    """How one layer gets from what it holds to what is wanted.

    Args:
        layer: the model's layer number.
        wanted: experts to hold afterwards, pinned.
        cache: beside them.
        missing: those of `wanted` that have to be read or pushed, in order.
        rebuild: new buffers are needed (another number of slots).
        drop_first: the old buffers go before the new ones come: both would not fit.
    """

    layer: int
    wanted: frozenset[int]
    cache: Cache
    missing: tuple[int, ...]
    rebuild: bool
    drop_first: bool

    @property
    def slots(self) -> int:
        return len(self.wanted) + self.cache.slots


class Holdings:
    """Experts of one model. `shape` and `compute_dtype` are those agreed at Hello; `own` reads the worker's copy."""

    def __init__(
        self, shape: ModelShape, compute_dtype: str, budget_bytes: int, mlx: MLXThread, own: OwnCopy | None = None
    ) -> None:
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.budget_bytes = budget_bytes
        self._mlx = mlx
        self._own = own
        self._layers: dict[int, ExpertLayer] = {}
        self._served: dict[int, frozenset[int]] = {}  # experts that are read when they are asked for
        self._slot_bytes = {spec.index: slot_bytes(spec, compute_dtype) for spec in shape.layers}
        self._counts: dict[int, SlotCounts] = {}  # of every layer that was ever held
        self._hints = 0
        self.installing = threading.Lock()

    @property
    def read_bytes(self) -> int:
        """Bytes of experts read from this worker's disk."""
        return self._own.store.counts.bytes if self._own is not None else 0

    @property
    def resident_bytes(self) -> int:
        return sum(layer.buffers.nbytes for layer in list(self._layers.values()))

    @property
    def expert_count(self) -> int:
        return sum(len(layer.table.slots) for layer in list(self._layers.values()))

    @property
    def counts(self) -> list[SlotCounts]:
        """Of the layers that have a cache."""
        return [layer.table.counts for index, layer in list(self._layers.items()) if index in self._served]

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the experts that were read into slots for a request or a hint."""
        sizes = {spec.index: spec.expert_bytes for spec in self.shape.layers}
        return sum((c.loads - c.installed) * sizes[index] for index, c in list(self._counts.items()))

    @property
    def total(self) -> SlotCounts:
        """Of all layers since this model is held, also of those given up."""
        total = SlotCounts()
        for counts in list(self._counts.values()):
            for part in fields(SlotCounts):
                setattr(total, part.name, getattr(total, part.name) + getattr(counts, part.name))
        return total

    @property
    def resident(self) -> tuple[int, int, int]:
        """Bytes of all slots, experts in them, and slots."""
        layers = list(self._layers.values())
        slots = sum(layer.buffers.capacity for layer in layers)
        return sum(layer.buffers.nbytes for layer in layers), sum(len(layer.table.slots) for layer in layers), slots

    def held(self, layer: int) -> frozenset[int]:
        """Experts in memory that stay there."""
        here = self._layers.get(layer)
        return frozenset(here.table.pinned) if here is not None else NONE

    def served(self, layer: int) -> frozenset[int]:
        """Experts that are read here when they are asked for."""
        return self._served.get(layer, NONE)

    def cache_slots(self, layer: int) -> int:
        here = self._layers.get(layer)
        return here.buffers.capacity - len(here.table.pinned) if here is not None else 0

    @property
    def unpinned_slots(self) -> int:
        return sum(self.cache_slots(layer) for layer in list(self._layers))

    def plan(self, wanted: Share) -> list[LayerStep]:
        """Steps to hold exactly `wanted` (and nothing of layers that are not named).

        Raises:
            MemoryBudgetError: it does not fit the budget.
            WorkerRefused: caches for a worker that has nothing to read from.
        """
        if wanted.caches and self._own is None:
            raise WorkerRefused(
                "cache slots were assigned to a worker that has nothing on its disk to read from",
                "start titan-worker with --model or --cache, or give it no slots beside the pinned ones",
            )
        total = sum(wanted.slots(layer) * self._slot_bytes[layer] for layer in wanted.layers)
        if total > self.budget_bytes:
            raise MemoryBudgetError(
                f"{format_bytes(total)} of experts were assigned to a worker whose budget is "
                f"{format_bytes(self.budget_bytes)}",
                "give titan-worker more --memory, or state its memory in hosts.yaml",
            )
        steps: list[LayerStep] = []
        resident = self.resident_bytes
        for layer in sorted(self._layers.keys() - wanted.layers):
            steps.append(LayerStep(layer, NONE, NO_CACHE, (), rebuild=True, drop_first=True))
            resident -= self._layers[layer].buffers.nbytes
        for layer in sorted(wanted.layers, key=lambda layer: self._growth_bytes(layer, wanted.slots(layer))):
            experts, slots = wanted.pinned.get(layer, NONE), wanted.slots(layer)
            here = self._layers.get(layer)
            new_bytes = slots * self._slot_bytes[layer]
            old_bytes = here.buffers.nbytes if here is not None else 0
            # Also rebuild to shrink, or slots without use would count against the budget of other layers.
            rebuild = here is None or here.buffers.capacity != slots or here.table.lost > 0
            drop_first = rebuild and here is not None and resident + new_bytes > self.budget_bytes
            there = NONE if here is None or drop_first else frozenset(here.table.slots)
            cache, missing = wanted.caches.get(layer, NO_CACHE), tuple(sorted(experts - there))
            steps.append(LayerStep(layer, experts, cache, missing, rebuild, drop_first))
            if rebuild:
                resident += new_bytes - old_bytes
        return steps

    def _growth_bytes(self, layer: int, slots: int) -> int:
        here = self._layers.get(layer)
        return slots * self._slot_bytes[layer] - (here.buffers.nbytes if here is not None else 0)

    def begin(self, step: LayerStep) -> dict[int, Sequence[np.ndarray]]:
        """Make room for a step; returns the views to fill for each missing expert. `finish` or `abandon` follows."""
        return self._mlx.run(lambda: self._begin(step))

    def _begin(self, step: LayerStep) -> dict[int, Sequence[np.ndarray]]:
        old = self._layers.get(step.layer)
        if old is not None and old.incoming is not None:
            old.incoming.clear()
        self._served.pop(step.layer, None)
        if step.drop_first:
            self._layers.pop(step.layer, None)
            old = None
        if not step.slots:
            return {}
        if step.rebuild:
            new = self._new_layer(LayerBuffers(self.shape.layer(step.layer), step.slots, self.compute_dtype), old)
            if old is not None:
                new.adopt(old, sorted(step.wanted), pin=True)
            self._layers[step.layer] = new
        else:
            new = self._layers[step.layer]
            for expert in sorted(new.table.slots.keys() - step.wanted):
                if expert not in step.cache.experts:
                    new.table.drop(expert)
                elif expert in new.table.pinned:
                    new.table.unpin(expert)
            for expert in step.wanted & new.table.slots.keys():
                new.table.pin(expert)
        slots = new.table.reserve(step.missing, (), pinning=True)
        assert slots is not None, "the step was planned for this table"
        if step.rebuild and old is not None:
            new.adopt(old, sorted(step.cache.experts - step.wanted))
        if step.cache.experts:
            self._served[step.layer] = step.cache.experts
        return {e: new.buffers.targets(slot) for e, slot in zip(step.missing, slots, strict=True)}

    def _new_layer(self, buffers: LayerBuffers, old: ExpertLayer | None) -> ExpertLayer:
        if old is not None:
            return old.heir(buffers)
        new = self._own.layer(buffers) if self._own is not None else ExpertLayer(buffers, _no_fill)
        new.table.counts = self._counts.setdefault(buffers.layer.index, new.table.counts)
        return new

    def finish(self, step: LayerStep) -> None:
        """The views that `begin` returned are filled: map them."""

        def work() -> None:
            layer = self._layers.get(step.layer)
            for expert in step.missing:
                assert layer is not None
                layer.table.map(expert, pin=True)
                layer.table.counts.installed += 1

        self._mlx.run(work)

    def serve(self, layer: int, experts: frozenset[int]) -> None:
        """Of a cache's experts, those that can be read here."""

        def work() -> None:
            self._served[layer] = experts
            if not experts:
                del self._served[layer]

        self._mlx.run(work)

    def abandon(self, step: LayerStep, *, written: bool = False) -> None:
        """Filling failed: give the reserved slots back; what was mapped stays usable.

        written: a read that has not ended may still write into them: out of use, until the next set to be held.
        """

        def work() -> None:
            layer = self._layers.get(step.layer)
            for expert in step.missing:
                assert layer is not None
                if written:
                    layer.table.lose(expert)
                else:
                    layer.table.release(expert)

        self._mlx.run(work)

    def execute(self, calls: Sequence[ExecuteCall]) -> list[ExecuteResult | TitanError]:
        """Run requests for one layer that sort alike, together: one outcome each. On the MLX thread.

        A request for an expert that is neither held nor served is refused; the others are executed. Times are those of
        the kernel they shared.
        """
        layer = self._layers.get(calls[0].layer)
        served = self._served.get(calls[0].layer, NONE)
        refusals = [_refusal(call, layer, served) for call in calls]
        good = [call for call, refusal in zip(calls, refusals, strict=True) if refusal is None]
        results = iter(self._run(layer, good) if layer is not None and good else ())
        return [refusal or next(results) for refusal in refusals]

    def prefetch(self, hint: Hint) -> bool:
        """Begin to read what a hint names; False when it leads to nothing. On the MLX thread.

        Where prefetched experts turn out to be useless, only some of the hints are followed.
        """
        layer, served = self._layers.get(hint.layer), self._served.get(hint.layer, NONE)
        if layer is None or layer.incoming is None or not served:
            return False
        self._hints += 1
        counts = layer.table.counts
        doubtful = counts.prefetched > TRUSTED_AFTER and counts.useful < MIN_PRECISION * counts.prefetched
        if doubtful and self._hints % SAMPLED_EVERY:
            return False
        absent = [e for e in hint.experts if e in served and e not in layer.table.slots]
        return bool(layer.incoming.begin(absent[: hint.reads], keep=frozenset(hint.experts)))

    def _run(self, layer: ExpertLayer, calls: Sequence[ExecuteCall]) -> list[ExecuteResult]:
        start = time.perf_counter()
        stalled_s = layer.table.counts.stall_s
        bits, rows, experts = _joined(calls)
        x = from_raw_bits(bits, COMPUTE_DTYPES[self.compute_dtype][1])
        y = layer.run_pairs(x, rows, experts, sort=calls[0].sort)
        outputs = self._outputs_of(calls, y)
        layer.settle()
        load_us = int((layer.table.counts.stall_s - stalled_s) * 1e6)
        compute_us = int((time.perf_counter() - start) * 1e6) - load_us
        return [
            ExecuteResult(call.request_id, outputs[place], 0, compute_us, load_us, reduced=call.scores is not None)
            for place, call in enumerate(calls)
        ]

    def _outputs_of(self, calls: Sequence[ExecuteCall], y: mx.array) -> list[np.ndarray]:
        """Raw bits of what each call is to get, of the outputs [P, D] of all their pairs."""
        ends = np.cumsum([call.pair_rows.shape[0] for call in calls]).tolist()
        slices = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        single = raw_bits(y) if any(call.scores is None for call in calls) else None
        outputs = []
        for call, part in zip(calls, slices, strict=True):
            if call.scores is None:
                assert single is not None
                outputs.append(single[part])
            else:
                sums = weighted_sums(y[part], call.pair_rows, call.scores, call.activations.shape[0])
                outputs.append(raw_bits(sums.astype(y.dtype)))
        return outputs


def _refusal(call: ExecuteCall, layer: ExpertLayer | None, served: frozenset[int]) -> WorkerRefused | None:
    unknown = set(call.pair_experts.tolist()).difference(layer.table.slots if layer is not None else (), served)
    if not unknown:
        return None
    return WorkerRefused(f"experts {sorted(unknown)[:8]} of layer {call.layer} are not held here", "assign them")


def _joined(calls: Sequence[ExecuteCall]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Activations, rows and experts of all calls as if they were one."""
    if len(calls) == 1:
        return calls[0].activations, calls[0].pair_rows, calls[0].pair_experts
    offsets = np.cumsum([0, *(call.activations.shape[0] for call in calls[:-1])]).astype(np.uint32)
    rows = [call.pair_rows + offset for call, offset in zip(calls, offsets, strict=True)]
    return (
        np.concatenate([call.activations for call in calls]),
        np.concatenate(rows),
        np.concatenate([call.pair_experts for call in calls]),
    )


def _no_fill(layer: int, expert: int, _targets: Sequence[np.ndarray]) -> None:
    raise WorkerRefused(f"expert {expert} of layer {layer} is not held here", "assign it")
