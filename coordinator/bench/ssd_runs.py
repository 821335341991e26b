"""Who decodes in `titan bench ssd`: everything at home, or one variant with its own slots, readers and KV cache.

All of them share mlx-lm's module and are stepped in turns on one thread. Compares nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from titan.common.execution import apply_rows
from titan.common.experts import ExpertLayer
from titan.common.prefetch.build import make_prefetcher
from titan.common.registry import Checkpoint
from titan.common.slots import make_policies
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import ExpertStore, ReaderPool, calibrate_reads
from titan.coordinator.bench.slow_store import SlowStore
from titan.coordinator.bench.ssd_variant import Variant
from titan.coordinator.cluster import READERS
from titan.coordinator.host.model import HostModel
from titan.coordinator.moe.dispatch import Dispatcher

__all__ = ["ResidentRun", "VariantRun"]

MEASURED_READS = 15
Execute = Callable[[int, mx.array, mx.array], mx.array]


class Run:
    """One KV cache and its layers. As the hooks' executor it passes on what the router chose, or puts the experts
    of `given` [tokens, layers, K] in their place."""

    reduced = False

    def __init__(self, host: HostModel, layers: dict[int, ExpertLayer], execute: Execute) -> None:
        self.layers = layers
        self.given: np.ndarray | None = None
        self.chosen: list[mx.array] = []
        self._host = host
        self._execute = execute
        self._cache = make_prompt_cache(host.module)
        self._positions = {layer: position for position, layer in enumerate(layers)}

    def step(self, token: int) -> tuple[mx.array, float]:
        """Logits [vocabulary], evaluated, and seconds."""
        self.chosen = []
        self._host.bind(self.layers, self)
        start = time.perf_counter()
        logits = self._host(mx.array([[token]]), cache=self._cache)[0, -1]
        mx.eval(logits)
        return logits, time.perf_counter() - start

    def routed(self) -> np.ndarray:
        """[layers, K] of the last step."""
        return np.stack([np.array(indices).reshape(-1) for indices in self.chosen]).astype(np.int64)

    def execute(self, layer: int, x: mx.array, indices: mx.array, scores: mx.array | None = None) -> mx.array:
        """x: [..., D], indices: [..., K] -> outputs [..., K, D]."""
        assert scores is None, "only asked for by executors that are reduced"
        if self.given is not None:
            indices = mx.array(self.given[self._positions[layer]], mx.uint32).reshape(indices.shape)
        self.chosen.append(indices)
        return self._execute(layer, x, indices)

    def executed_at_home(self, pairs: int) -> None: ...


class ResidentRun(Run):
    """Every expert at home, expert e in slot e: nothing to look up, no synchronisation."""

    def __init__(self, host: HostModel, checkpoint: Checkpoint, dtype: str) -> None:
        store = ExpertStore(checkpoint)
        experts = checkpoint.shape.num_experts
        layers = {
            spec.index: ExpertLayer(LayerBuffers(spec, experts, dtype), store.read_expert)
            for spec in checkpoint.shape.layers
        }
        for layer in layers.values():
            layer.pin_all(experts)
            layer.whole = False  # so that the choice passes through here
        store.close()
        super().__init__(host, layers, lambda layer, x, indices: apply_rows(layers[layer].buffers, x, indices))


class VariantRun(Run):
    """A variant as a coordinator without workers would serve it."""

    def __init__(self, host: HostModel, checkpoint: Checkpoint, variant: Variant, dtype: str) -> None:
        self.variant = variant
        self.checkpoint = checkpoint
        self._store = SlowStore(checkpoint, variant.cache, variant.read_delay_s)
        self._pool = ReaderPool(READERS)
        shape = checkpoint.shape
        policies = make_policies(variant.policy, shape.num_experts, len(shape.layers))
        layers = {
            spec.index: ExpertLayer(
                LayerBuffers(spec, variant.slots, dtype),
                self._store.read_expert,
                policy,
                self._pool,
                fill_many=self._store.read_experts,
                fill_cached=self._store.read_cached,
                overlap=variant.overlap,
            )
            for spec, policy in zip(shape.layers, policies, strict=True)
        }
        dispatcher = Dispatcher(layers, [], shape.hidden_size, dtype)
        routers = dict(enumerate(host.routers))
        dispatcher.prefetcher = make_prefetcher(
            variant.prefetch, list(layers.values()), shape.num_experts, READERS, routers, forced=variant.forced
        )
        self.prefetcher = dispatcher.prefetcher
        super().__init__(host, layers, dispatcher.execute)
        self._read_s = self._measure_reads()

    def bring(self, ids: np.ndarray) -> None:
        """Let the tables see ids [tokens, layers, K] as if those tokens had been decoded; nothing is computed."""
        for token in ids:
            for layer, row in zip(self.layers.values(), token, strict=True):
                chosen: list[int] = row.tolist()
                table = layer.table
                missing = table.look_up(chosen)
                slots = table.reserve(missing, frozenset(chosen)) or []
                for expert, slot in zip(missing, slots, strict=True):
                    self._store.read_expert(layer.buffers.layer.index, expert, layer.buffers.targets(slot))
                    table.map(expert)

    def counts(self) -> np.ndarray:
        """[layers, 7]: hits, misses, loads, prefetched, useful, late, seconds of stall."""
        counted = [layer.table.counts for layer in self.layers.values()]
        return np.array(
            [[c.hits, c.misses, c.loads, c.prefetched, c.useful, c.late, c.stall_s] for c in counted], np.float64
        )

    @property
    def fetch_s(self) -> float:
        """lambda: one expert alone."""
        return float(self._read_s[1])

    def stalls(self, misses: np.ndarray) -> np.ndarray:
        """[tokens] seconds that [tokens, layers] misses take, each layer's read at once by all readers."""
        return np.interp(misses, np.arange(len(self._read_s)), self._read_s).sum(axis=1)

    def close(self) -> None:
        self._pool.close()
        self._store.close()

    def _measure_reads(self) -> np.ndarray:
        """[K + 1] seconds that so many experts take when they are asked for at once."""
        most = self.checkpoint.shape.top_k
        sizes = sorted({1, 2, max(1, most // 2), most})
        calibrate_reads(self._store, batch=most, repeats=2, widths=(READERS,))  # checksums of first reads, page cache
        times = [
            calibrate_reads(self._store, batch=size, repeats=MEASURED_READS, widths=(READERS,)).batch_s[READERS]
            for size in sizes
        ]
        return np.interp(np.arange(most + 1), [0, *sizes], [0.0, *times])
