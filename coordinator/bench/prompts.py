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
from titan.common.stream import LayerStream
from titan.coordinator.bench.slow_disk import SlowStore

__all__ = ["PromptFigures", "bench_prompts"]

FLOATS = ("F32", "F16", "BF16")
READERS = 4  # as a coordinator has


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """Medians a layer over the repeats, and `over_bound`, the median of layer / max(compute, reads) of each repeat.

    Args:
        section: experts in each of two buffers beside the slots; 0 where only slots were used.
        compute_ms: with every expert in a slot.
        reads_ms: reading as many experts as this way had to, nothing computed.
        stall_ms: mean; the layer's thread waited for reads.
        loads: mean experts read a layer.
    """

    slots: int
    section: int
    rows: int
    cache: CacheMode
    read_mbytes_per_s: float
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
    section: int = 0,
    bytes_per_s: int = 0,
    repeats: int = 4,
    on_repeat: Callable[[int], None] = lambda _done: None,
) -> list[PromptFigures]:
    """The same prompt in turns, forwards and backwards: through the slots, past them, all at home, read only.

    The sections' buffers take slots away, as they do where they are used: 2 x section / the model's layers.

    Args:
        section: experts a section; 0 takes the whole layer.
        bytes_per_s: of the disk; 0 takes it as it is.
    """
    shape = checkpoint.shape
    dtype = compute_dtype({t.dtype for t in checkpoint.non_expert_tensors if t.dtype in FLOATS})
    specs = [spec for spec in shape.layers if spec.matrices == shape.layers[0].matrices][:layers]
    store = SlowStore(checkpoint, bytes_per_s, cache=cache, verify="never")
    pool = ReaderPool(READERS)
    random = np.random.default_rng(0)
    choices = [
        np.stack([random.permutation(shape.num_experts)[: shape.top_k] for _ in range(rows)]).astype(np.uint32)
        for _ in specs
    ]
    start = mx.array(random.standard_normal((rows, shape.hidden_size), dtype=np.float32))
    section = section or shape.num_experts
    fewer = max(1, slots - -(-2 * section // len(shape.layers)))
    resident = _Way(specs, shape.num_experts, 0, shape.num_experts, dtype, store, pool)
    resident.fill()
    ways = [
        _Way(specs, slots, 0, shape.num_experts, dtype, store, pool),
        _Way(specs, fewer, section, shape.num_experts, dtype, store, pool),
    ]
    expected = resident.run(start, choices).y
    for way in ways:
        way.run(start, choices)  # fills the slots
    compute_s: list[float] = []
    runs: list[list[_Run]] = [[] for _ in ways]
    reads_s: list[list[float]] = [[] for _ in ways]
    for repeat in range(repeats):
        on_repeat(repeat)
        compute_s.append(resident.run(start, choices).layer_s)
        for number in range(len(ways))[:: -1 if repeat % 2 else 1]:
            run = ways[number].run(start, choices)
            runs[number].append(run)
            reads_s[number].append(resident.read_again(round(run.loads)))
    figures = []
    for way, found, read in zip(ways, runs, reads_s, strict=True):
        bounds = [max(pair) for pair in zip(compute_s, read, strict=True)]
        figures.append(
            PromptFigures(
                slots=way.slots,
                section=way.section,
                rows=rows,
                cache=cache,
                read_mbytes_per_s=bytes_per_s / 1e6,
                layer_ms=1e3 * statistics.median(run.layer_s for run in found),
                compute_ms=1e3 * statistics.median(compute_s),
                reads_ms=1e3 * statistics.median(read),
                over_bound=statistics.median(run.layer_s / b for run, b in zip(found, bounds, strict=True)),
                stall_ms=1e3 * statistics.mean(run.stall_s for run in found),
                loads=statistics.mean(run.loads for run in found),
                identical=all(np.array_equal(run.y, expected) for run in found),
            )
        )
        way.close()
    pool.close()
    store.close()
    return figures


@dataclass(frozen=True, slots=True)
class _Run:
    """Means a layer."""

    layer_s: float
    stall_s: float
    loads: float
    y: np.ndarray


class _Way:
    """The layers with their slots; `section` experts a section, 0 for none."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        slots: int,
        section: int,
        num_experts: int,
        dtype: str,
        store: SlowStore,
        pool: ReaderPool,
    ) -> None:
        self.slots, self.section = slots, section
        self._num_experts, self._store, self._pool = num_experts, store, pool
        self._stream: LayerStream | None = None
        self._layers = {
            spec.index: ExpertLayer(
                LayerBuffers(spec, slots, dtype), store.read_expert, None, pool, fill_many=store.read_experts
            )
            for spec in specs
        }
        if section:
            self._stream = LayerStream(
                (LayerBuffers(specs[0], section, dtype), LayerBuffers(specs[0], section, dtype)),
                store.read_experts,
                pool,
                list(self._layers),
                lambda index: [e for e in range(num_experts) if e not in self._layers[index].table.slots],
            )
            self._stream.rates.scattered_s = float("inf")  # whatever it costs: that is what is measured
        for layer in self._layers.values():
            layer.stream = self._stream

    def fill(self) -> None:
        """Every expert into a slot."""
        for layer in self._layers.values():
            layer.pin(range(self._num_experts))

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
        """Seconds a layer to read so many experts into their own slots, one after the other layer."""
        begun = time.perf_counter()
        jobs = []
        for index, layer in self._layers.items():
            for expert in range(experts):
                target = layer.buffers.targets(layer.table.slots[expert])
                jobs.append(lambda i=index, e=expert, t=target: self._store.read_expert(i, e, t))
        if jobs:
            self._pool.run_all(jobs)
        return (time.perf_counter() - begun) / len(self._layers)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _stall_s(self) -> float:
        return sum(layer.table.counts.stall_s for layer in self._layers.values())
