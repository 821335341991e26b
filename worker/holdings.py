"""The experts a worker holds: per layer a pinned slot table, installed from a checkpoint or from pushed bytes.

What is to be held is stated whole; what is there already stays. Never more than the budget (constraint (mem)), also
while one set is exchanged for another. Allocation, mapping and execution happen on the MLX thread; reading does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan.common.arrays import COMPUTE_DTYPES, from_raw_bits, raw_bits
from titan.common.errors import MemoryBudgetError, TitanError, WorkerRefused
from titan.common.experts import ExpertLayer
from titan.common.registry.shape import ModelShape
from titan.common.slots.buffers import LayerBuffers, slot_bytes
from titan.common.units import format_bytes
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.worker.engine import MLXThread

Residency = Mapping[int, frozenset[int]]


@dataclass(frozen=True, slots=True)
class LayerStep:
    """How one layer gets from what it holds to what is wanted.

    Args:
        layer: the model's layer number.
        wanted: experts to hold afterwards (all of them pinned).
        missing: those that have to be read or pushed, in order.
        rebuild: new buffers are needed (more experts than slots).
        drop_first: the old buffers go before the new ones come: both would not fit.
    """

    layer: int
    wanted: frozenset[int]
    missing: tuple[int, ...]
    rebuild: bool
    drop_first: bool


class Holdings:
    """Experts of one model. `shape` and `compute_dtype` are those agreed at Hello."""

    def __init__(self, shape: ModelShape, compute_dtype: str, budget_bytes: int, mlx: MLXThread) -> None:
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.budget_bytes = budget_bytes
        self._mlx = mlx
        self._layers: dict[int, ExpertLayer] = {}
        self._slot_bytes = {spec.index: slot_bytes(spec, compute_dtype) for spec in shape.layers}
        self.installing = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        return sum(layer.buffers.nbytes for layer in list(self._layers.values()))

    @property
    def expert_count(self) -> int:
        return sum(len(layer.table.slots) for layer in list(self._layers.values()))

    @property
    def resident(self) -> tuple[int, int, int]:
        """Bytes of all slots, experts in them, and slots."""
        layers = list(self._layers.values())
        slots = sum(layer.buffers.capacity for layer in layers)
        return sum(layer.buffers.nbytes for layer in layers), sum(len(layer.table.slots) for layer in layers), slots

    def held(self, layer: int) -> frozenset[int]:
        here = self._layers.get(layer)
        return frozenset(here.table.slots) if here is not None else frozenset()

    def check(self, wanted: Residency) -> None:
        """Whether `wanted` names experts this model has.

        Raises:
            WorkerRefused: a layer or expert that does not exist.
        """
        for layer, experts in wanted.items():
            if layer not in self._slot_bytes:
                raise WorkerRefused(f"the model has no experts in layer {layer}", "plan again for this model")
            if experts and max(experts) >= self.shape.num_experts:
                raise WorkerRefused(f"layer {layer} has no expert {max(experts)}", "plan again for this model")

    def plan(self, wanted: Residency) -> list[LayerStep]:
        """Steps to hold exactly `wanted` (and nothing of layers that are not named).

        Raises:
            MemoryBudgetError: it does not fit the budget.
        """
        total = sum(len(experts) * self._slot_bytes[layer] for layer, experts in wanted.items())
        if total > self.budget_bytes:
            raise MemoryBudgetError(
                f"{format_bytes(total)} of experts were assigned to a worker whose budget is "
                f"{format_bytes(self.budget_bytes)}",
                "give titan-worker more --memory, or state its memory in hosts.yaml",
            )
        steps: list[LayerStep] = []
        resident = self.resident_bytes
        gone = sorted(set(self._layers) - {layer for layer, experts in wanted.items() if experts})
        for layer in gone:
            steps.append(LayerStep(layer, frozenset(), (), rebuild=True, drop_first=True))
            resident -= self._layers[layer].buffers.nbytes
        for layer, experts in sorted(wanted.items(), key=lambda item: self._growth_bytes(*item)):
            if not experts:
                continue
            here = self._layers.get(layer)
            held = self.held(layer)
            new_bytes = len(experts) * self._slot_bytes[layer]
            old_bytes = here.buffers.nbytes if here is not None else 0
            # Also rebuild to shrink, or slots without use would count against the budget of other layers.
            rebuild = here is None or here.buffers.capacity != len(experts)
            drop_first = rebuild and here is not None and resident + new_bytes > self.budget_bytes
            missing = experts if drop_first else experts - held
            steps.append(LayerStep(layer, experts, tuple(sorted(missing)), rebuild, drop_first))
            if rebuild:
                resident += new_bytes - old_bytes
        return steps

    def _growth_bytes(self, layer: int, experts: frozenset[int]) -> int:
        here = self._layers.get(layer)
        return len(experts) * self._slot_bytes[layer] - (here.buffers.nbytes if here is not None else 0)

    def begin(self, step: LayerStep) -> dict[int, Sequence[np.ndarray]]:
        """Make room for a step; returns the views to fill for each missing expert. `finish` or `abandon` follows."""
        return self._mlx.run(lambda: self._begin(step))

    def _begin(self, step: LayerStep) -> dict[int, Sequence[np.ndarray]]:
        old = self._layers.get(step.layer)
        if step.drop_first:
            self._layers.pop(step.layer, None)
            old = None
        if not step.wanted:
            return {}
        if step.rebuild:
            buffers = LayerBuffers(self.shape.layer(step.layer), len(step.wanted), self.compute_dtype)
            new = ExpertLayer(buffers, _no_fill)
            retained = [] if old is None else sorted(step.wanted & set(old.table.slots))
            slots = new.table.reserve(retained, ()) or []
            for expert, slot in zip(retained, slots, strict=True):
                assert old is not None
                new.buffers.copy_slot(slot, old.buffers, old.table.slots[expert])
                new.table.map(expert, pin=True)
            self._layers[step.layer] = new
        else:
            new = self._layers[step.layer]
            for expert in sorted(set(new.table.slots) - step.wanted):
                new.table.drop(expert)
        slots = new.table.reserve(step.missing, ())
        assert slots is not None, "the step was planned for this table"
        return {e: new.buffers.targets(slot) for e, slot in zip(step.missing, slots, strict=True)}

    def finish(self, step: LayerStep) -> None:
        """The views that `begin` returned are filled: map them."""

        def work() -> None:
            layer = self._layers.get(step.layer)
            for expert in step.missing:
                assert layer is not None
                layer.table.map(expert, pin=True)

        self._mlx.run(work)

    def abandon(self, step: LayerStep) -> None:
        """Filling failed: give the reserved slots back; what was mapped stays usable."""

        def work() -> None:
            layer = self._layers.get(step.layer)
            for expert in step.missing:
                assert layer is not None
                layer.table.release(expert)

        self._mlx.run(work)

    def execute(self, calls: Sequence[ExecuteCall]) -> list[ExecuteResult | TitanError]:
        """Run requests for one layer that sort alike, together: one outcome each. On the MLX thread.

        A request for an expert that is not held is refused; the others are executed. Times are those of the kernel
        they shared.
        """
        layer = self._layers.get(calls[0].layer)
        refusals = [_refusal(call, layer) for call in calls]
        good = [call for call, refusal in zip(calls, refusals, strict=True) if refusal is None]
        results = iter(self._run(layer, good) if layer is not None and good else ())
        return [refusal or next(results) for refusal in refusals]

    def _run(self, layer: ExpertLayer, calls: Sequence[ExecuteCall]) -> list[ExecuteResult]:
        start = time.perf_counter()
        stalled_s = layer.table.counts.stall_s
        bits, rows, experts = _joined(calls)
        x = from_raw_bits(bits, COMPUTE_DTYPES[self.compute_dtype][1])
        outputs = raw_bits(layer.run_pairs(x, rows, experts, sort=calls[0].sort))
        layer.settle()
        load_us = int((layer.table.counts.stall_s - stalled_s) * 1e6)
        compute_us = int((time.perf_counter() - start) * 1e6) - load_us
        results = []
        end = 0
        for call in calls:
            begin, end = end, end + call.pair_rows.shape[0]
            results.append(ExecuteResult(call.request_id, outputs[begin:end], 0, compute_us, load_us))
        return results


def _refusal(call: ExecuteCall, layer: ExpertLayer | None) -> WorkerRefused | None:
    unknown = set(call.pair_experts.tolist()).difference(layer.table.slots if layer is not None else ())
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
