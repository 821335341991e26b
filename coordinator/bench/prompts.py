"""A prompt's MoE layers with too few slots, beside the time that nobody can beat: its compute or its reads alone.

The layers alone, one after the other, each fed what the one before gave; router's choices drawn at random. Neither
attention nor a server.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from titan.common.arrays import compute_dtype
from titan.common.experts import ExpertLayer
from titan.common.registry import Checkpoint
from titan.common.registry.shape import LayerSpec
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import CacheMode, ReaderPool
from titan.coordinator.bench.slow_store import SlowStore

__all__ = ["PromptFigures", "bench_prompts"]

FLOATS = ("F32", "F16", "BF16")
READERS = 4  # as a coordinator has


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """Medians a layer over the repeats, and `over_bound`, the median of layer / max(compute, reads) of each repeat.

    Args:
        compute_ms: with every expert in a slot.
        reads_ms: reading as many experts as this way had to, nothing computed.
        stall_ms: mean; the layer's thread waited for reads.
        loads: mean experts read a layer.
    """

    slots: int
    rows: int
    cache: CacheMode
    read_delay_ms: float
    layer_ms: float
    compute_ms: float
    reads_ms: float
    over_bound: float
    stall_ms: float
    loads: float
    identical: bool


def bench_prompts(
    checkpoint: Checkpoint,
    slots: int,
    rows: int,
    layers: int,
    *,
    cache: CacheMode,
    read_delay_s: float = 0.0,
    repeats: int = 4,
    on_repeat: Callable[[int], None] = lambda _done: None,
) -> PromptFigures:
    """The same prompt in turns: with every expert in a slot, through `slots` slots, and its reads alone.

    Args:
        layers: of the model, that many at most.
        read_delay_s: that an expert's read takes longer than the disk needs.
    """
    shape = checkpoint.shape
    dtype = compute_dtype({t.dtype for t in checkpoint.non_expert_tensors if t.dtype in FLOATS})
    specs = [spec for spec in shape.layers if spec.matrices == shape.layers[0].matrices][:layers]
    store = SlowStore(checkpoint, cache, read_delay_s)
    pool = ReaderPool(READERS)
    random = np.random.default_rng(0)
    choices = [
        np.stack([random.permutation(shape.num_experts)[: shape.top_k] for _ in range(rows)]).astype(np.uint32)
        for _ in specs
    ]
    start = mx.array(random.standard_normal((rows, shape.hidden_size), dtype=np.float32))
    resident = _Layers(specs, shape.num_experts, dtype, store, pool)
    resident.fill()
    few = _Layers(specs, slots, dtype, store, pool)
    expected = resident.run(start, choices).y
    identical = np.array_equal(few.run(start, choices).y, expected)  # fills the slots
    turns: list[tuple[float, _Run, float]] = []
    for repeat in range(repeats):
        on_repeat(repeat)
        compute_s = resident.run(start, choices).layer_s
        run = few.run(start, choices)
        turns.append((compute_s, run, resident.read_again(round(run.loads))))
        identical = identical and np.array_equal(run.y, expected)
    pool.close()
    store.close()
    return PromptFigures(
        slots=slots,
        rows=rows,
        cache=cache,
        read_delay_ms=1e3 * read_delay_s,
        layer_ms=1e3 * statistics.median(run.layer_s for _, run, _ in turns),
        compute_ms=1e3 * statistics.median(compute_s for compute_s, _, _ in turns),
        reads_ms=1e3 * statistics.median(reads_s for _, _, reads_s in turns),
        over_bound=statistics.median(run.layer_s / max(compute_s, reads_s) for compute_s, run, reads_s in turns),
        stall_ms=1e3 * statistics.mean(run.stall_s for _, run, _ in turns),
        loads=statistics.mean(run.loads for _, run, _ in turns),
        identical=identical,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Means a layer."""

    layer_s: float
    stall_s: float
    loads: float
    y: np.ndarray


class _Layers:
    """All with so many slots."""

    def __init__(self, specs: Sequence[LayerSpec], slots: int, dtype: str, store: SlowStore, pool: ReaderPool) -> None:
        self._store, self._pool = store, pool
        self._layers = {
            spec.index: ExpertLayer(
                LayerBuffers(spec, slots, dtype),
                store.read_expert,
                None,
                pool,
                fill_many=store.read_experts,
                fill_cached=store.read_cached,
            )
            for spec in specs
        }

    def fill(self) -> None:
        """Every expert into a slot."""
        for layer in self._layers.values():
            layer.pin(range(layer.table.capacity))

    def run(self, x: mx.array, choices: Sequence[np.ndarray]) -> _Run:
        """x: [N, D] through all layers, choices: [N, K] each."""
        stall_s, experts = self._stall_s(), self._store.counts.experts
        begun = time.perf_counter()
        for layer, chosen in zip(self._layers.values(), choices, strict=True):
            y = layer.run_rows(x, chosen).mean(axis=1)
            x = y * mx.rsqrt(mx.mean(y * y, axis=-1, keepdims=True) + 1e-6)
            mx.eval(x)
        took_s = time.perf_counter() - begun
        count = len(self._layers)
        return _Run(
            took_s / count,
            (self._stall_s() - stall_s) / count,
            (self._store.counts.experts - experts) / count,
            np.array(x),
        )

    def read_again(self, experts: int) -> float:
        """Seconds a layer to read so many experts into their own slots, layer after layer."""
        begun = time.perf_counter()
        jobs = []
        for index, layer in self._layers.items():
            for expert in range(experts):
                target = layer.buffers.targets(layer.table.slots[expert])
                jobs.append(lambda i=index, e=expert, t=target: self._store.read_expert(i, e, t))
        if jobs:
            self._pool.run_all(jobs)
        return (time.perf_counter() - begun) / len(self._layers)

    def _stall_s(self) -> float:
        return sum(layer.table.counts.stall_s for layer in self._layers.values())
