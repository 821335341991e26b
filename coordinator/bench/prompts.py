"""A prompt's MoE layers with too few slots: group by group through the slots against section by section past them.

The layers alone, one after the other, each fed what the one before gave; router's choices drawn at random. Neither
attention nor a server.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from titan.common.experts import ExpertLayer
from titan.common.registry import Checkpoint
from titan.common.registry.shape import LayerSpec
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import CacheMode, ExpertStore, ReaderPool
from titan.common.stream import LayerStream

__all__ = ["PromptFigures", "bench_prompts"]

READERS = 4  # as a coordinator has
REPEATS = 4


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """A layer: the median time, and the mean of what its thread waited for reads while little or nothing was computed.

    `section` is 0 where the slots were used; `buffer_mbytes` is what the sections take.
    """

    slots: int
    section: int
    rows: int
    cache: CacheMode
    packed: bool
    layer_ms: float
    stall_ms: float
    buffer_mbytes: float
    identical: bool


def bench_prompts(
    checkpoint: Checkpoint, slots: int, rows: int, layers: int, dtype: str, *, cache: CacheMode, section: int = 0
) -> Iterator[PromptFigures]:
    """Two ways to read the same prompt, by turns: through `slots` slots a layer, and past them.

    Args:
        section: experts a section; 0 takes the whole layer.
    """
    shape = checkpoint.shape
    specs = [spec for spec in shape.layers if spec.matrices == shape.layers[0].matrices][:layers]
    store = ExpertStore(checkpoint, cache=cache, verify="never")
    pool = ReaderPool(READERS)
    random = np.random.default_rng(0)
    choices = [
        np.stack([random.permutation(shape.num_experts)[: shape.top_k] for _ in range(rows)]).astype(np.uint32)
        for _ in specs
    ]
    start = mx.array(random.standard_normal((rows, shape.hidden_size), dtype=np.float32))
    ways = [_Way(checkpoint, specs, slots, width, dtype, store, pool) for width in (0, section or shape.num_experts)]
    results = [[way.run(start, choices) for way in ways] for _ in range(REPEATS + 1)][1:]
    first = results[0][0]
    for way, found in zip(ways, zip(*results, strict=True), strict=True):
        yield PromptFigures(
            slots=slots,
            section=way.width,
            rows=rows,
            cache=cache,
            packed=checkpoint.pack is not None,
            layer_ms=1e3 * statistics.median(s for run in found for s in run.layer_s),
            stall_ms=1e3 * statistics.mean(run.stall_s for run in found) / len(specs),
            buffer_mbytes=0.0 if way.stream is None else way.stream.nbytes / 1e6,
            identical=all(np.array_equal(run.y, first.y) for run in found),
        )
        if way.stream is not None:
            way.stream.close()
    pool.close()
    store.close()


@dataclass(frozen=True, slots=True)
class _Run:
    layer_s: list[float]
    stall_s: float
    y: np.ndarray


class _Way:
    """The layers with their slots; `width` experts a section, 0 for none."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        specs: Sequence[LayerSpec],
        slots: int,
        width: int,
        dtype: str,
        store: ExpertStore,
        pool: ReaderPool,
    ) -> None:
        experts = range(checkpoint.shape.num_experts)
        self.width = width
        self.stream: LayerStream | None = None
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
        if width:
            self.stream = LayerStream(
                (LayerBuffers(specs[0], width, dtype), LayerBuffers(specs[0], width, dtype)),
                store.read_experts,
                pool,
                list(self._layers),
                lambda index: [e for e in experts if e not in self._layers[index].table.slots],
            )
            self.stream.rates.scattered_s = float("inf")  # whatever it costs: that is what is measured
        for layer in self._layers.values():
            layer.stream = self.stream

    def run(self, x: mx.array, choices: Sequence[np.ndarray]) -> _Run:
        """x: [N, D] through all layers, choices: [N, K] each."""
        before = sum(layer.table.counts.stall_s for layer in self._layers.values())
        took = []
        for layer, chosen in zip(self._layers.values(), choices, strict=True):
            begun = time.perf_counter()
            y = layer.run_rows(x, chosen).mean(axis=1)
            x = y * mx.rsqrt(mx.mean(y * y, axis=-1, keepdims=True) + 1e-6)
            mx.eval(x)
            took.append(time.perf_counter() - begun)
        stall = sum(layer.table.counts.stall_s for layer in self._layers.values())
        return _Run(took, stall - before, np.array(x))
