"""The SSD tier in figures: what an install costs, and decode against all-resident plus the stall nobody can avoid.

One process, one loaded host model; every variant decodes the same tokens, checked against all-resident.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from titan.common.arrays import compute_dtype
from titan.common.experts import ExpertLayer
from titan.common.prefetch.build import make_prefetcher
from titan.common.registry import Checkpoint
from titan.common.slots import EvictionPolicy, SlotTable, make_policy
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import CacheMode, ExpertStore, ReaderPool, calibrate_reads
from titan.coordinator.host.model import HostModel, load_host_model
from titan.coordinator.moe.dispatch import Dispatcher
from titan.placement.simulate import Table

__all__ = ["SsdBench", "Variant", "VariantFigures"]

FIRST_TOKEN = 5
TEMPERATURE = 0.8
CHUNK_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run: C slots a layer, policy, prefetch, cache mode; `packed` reads from the pack."""

    slots: int
    policy: str = "lru"
    prefetch: str = "off"
    forced: int | None = None
    cache: CacheMode = CacheMode.PAGE_CACHE
    packed: bool = False
    overlap: bool = False

    @property
    def name(self) -> str:
        parts = [self.policy]
        if self.prefetch != "off":
            parts.append(self.prefetch + ("" if self.forced is None else f" m={self.forced}"))
        if self.overlap:
            parts.append("overlap")
        return f"{', '.join(parts)}; {'packed' if self.packed else 'as mlx saves'}, {self.cache}"


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer, a token: hit rate, loads, late prefetches, stall."""

    layer: int
    hit_rate: float
    loads: float
    late: float
    stall_ms: float


@dataclass(frozen=True, slots=True)
class VariantFigures:
    """Means a token over the counted tokens; `unavoidable_ms` is the stall that the simulator says this
    policy cannot avoid without prefetch; `over_expected` the median of token / (resident + unavoidable) over chunks."""

    variant: Variant
    name: str
    token_ms: float
    resident_ms: float
    unavoidable_ms: float
    over_expected: float
    hit_rate: float
    simulated_hit_rate: float
    belady_hit_rate: float
    loads: float
    mbytes: float
    prefetched: float
    useful: float
    late: float
    stall_ms: float
    read_gb_per_s: float
    fetch_ms: float
    readers: int
    identical: bool
    layers: list[LayerFigures] = field(default_factory=list)


class SsdBench:
    """Decodes `tokens` tokens with each variant after `warm` uncounted ones. All MLX work on the calling thread."""

    def __init__(self, checkpoint: Checkpoint, pack: Checkpoint | None, tokens: int, warm: int) -> None:
        self.checkpoint = checkpoint
        self.pack = pack
        self.tokens = tokens
        self.warm = warm
        floats = {t.dtype for t in checkpoint.non_expert_tensors if t.dtype in ("F32", "F16", "BF16")}
        self.dtype = compute_dtype(floats)
        self.host: HostModel = load_host_model(checkpoint, self.dtype)
        self.ids = np.empty((0, 0, 0), np.int64)
        self.expected: list[int] = []
        self.inputs = [FIRST_TOKEN]
        self._resident: dict[int, ExpertLayer] = {}
        self._reads: dict[tuple[CacheMode, bool], tuple[float, int, float]] = {}

    def run_resident(self) -> None:
        """Everything at home: draws the tokens that all variants are fed, and keeps the router's choices."""
        store = ExpertStore(self.checkpoint)
        self._resident = self._layers(store, self.checkpoint.shape.num_experts, "lru", None)
        for layer in self._resident.values():
            layer.pin(range(self.checkpoint.shape.num_experts))
        store.close()
        recorder = _Recorder(self._resident, self.checkpoint.shape.hidden_size, self.dtype)
        self.host.bind(self._resident, recorder)
        stepper = _Stepper(self.host, self._resident, recorder)
        key = mx.random.key(0)
        for number in range(self.warm + self.tokens):
            logits = stepper.step(self.inputs[-1])
            self.expected.append(_item(mx.argmax(logits)))
            drawn = mx.random.categorical(logits / TEMPERATURE, key=mx.random.split(key, number + 2)[number])
            self.inputs.append(_item(drawn))
        self.ids = recorder.trace(len(self._resident))
        for layer in self._resident.values():
            layer.whole = True
        self.host.unbind()

    def run(self, variant: Variant) -> VariantFigures:
        """One variant; `run_resident` comes first."""
        checkpoint = self.pack if variant.packed else self.checkpoint
        if checkpoint is None:
            raise ValueError("there is no pack to read from")
        store = ExpertStore(checkpoint, cache=variant.cache)
        fetch_s, width, bandwidth = self._read_figures(variant, store)
        pool = ReaderPool(max(2, width))
        shape = checkpoint.shape
        layers = self._layers(store, variant.slots, variant.policy, pool, overlap=variant.overlap)
        dispatcher = Dispatcher(layers, [], shape.hidden_size, self.dtype)
        dispatcher.prefetcher = make_prefetcher(
            variant.prefetch,
            list(layers.values()),
            shape.num_experts,
            pool.width,
            dict(enumerate(self.host.routers)),
            forced=variant.forced,
        )
        home = Dispatcher(self._resident, [], shape.hidden_size, self.dtype)
        resident, own = _Stepper(self.host, self._resident, home), _Stepper(self.host, layers, dispatcher)
        misses_a_step, simulated, belady = self._simulate(variant)
        stalls = fetch_s * np.ceil(misses_a_step / width).sum(axis=1)
        before: list[tuple[float, ...]] = []
        tokens: list[int] = []
        chunks: list[tuple[float, float, float]] = []  # seconds resident, of the variant, of unavoidable stall
        for first in range(0, self.warm + self.tokens, CHUNK_TOKENS):
            if first == self.warm:
                before = [_counts(layer) for layer in layers.values()]
            span = range(first, min(first + CHUNK_TOKENS, self.warm + self.tokens))
            chunk = []
            for stepper in (resident, own):  # side by side, so that a busy machine disturbs both
                self.host.bind(stepper.layers, stepper.executor)
                start = time.perf_counter()
                for step in span:
                    logits = stepper.step(self.inputs[step])
                    if stepper is own:
                        tokens.append(_item(mx.argmax(logits)))
                chunk.append(time.perf_counter() - start)
            if first >= self.warm:
                chunks.append((chunk[0], chunk[1], float(stalls[first - self.warm :][: len(span)].sum())))
        after = [_counts(layer) for layer in layers.values()]
        self.host.unbind()
        pool.close()
        store.close()
        each = [np.subtract(b, a) / self.tokens for a, b in zip(before, after, strict=True)]
        hits, misses, loads, prefetched, useful, late, stall = np.sum(each, axis=0)
        seconds = np.array(chunks)
        resident_ms, token_ms, unavoidable_ms = 1e3 * seconds.sum(axis=0) / self.tokens
        return VariantFigures(
            variant=variant,
            name=variant.name,
            token_ms=token_ms,
            resident_ms=resident_ms,
            unavoidable_ms=unavoidable_ms,
            over_expected=float(np.median(seconds[:, 1] / (seconds[:, 0] + seconds[:, 2]))),
            hit_rate=hits / (hits + misses),
            simulated_hit_rate=simulated,
            belady_hit_rate=belady,
            loads=loads,
            mbytes=loads * shape.layers[0].expert_bytes / 1e6,
            prefetched=prefetched,
            useful=useful,
            late=late,
            stall_ms=1e3 * stall,
            read_gb_per_s=bandwidth / 1e9,
            fetch_ms=1e3 * fetch_s,
            readers=width,
            identical=tokens == self.expected,
            layers=[
                LayerFigures(index, e[0] / (e[0] + e[1]), e[2], e[5], 1e3 * e[6])
                for index, e in zip(layers, each, strict=True)
            ],
        )

    def _layers(
        self, store: ExpertStore, slots: int, policy: str, pool: ReaderPool | None, *, overlap: bool = False
    ) -> dict[int, ExpertLayer]:
        shape = self.checkpoint.shape
        return {
            spec.index: ExpertLayer(
                LayerBuffers(spec, slots, self.dtype),
                store.read_expert,
                make_policy(policy, shape.num_experts),
                pool,
                fill_many=store.read_experts,
                overlap=overlap,
            )
            for spec in shape.layers
        }

    def _read_figures(self, variant: Variant, store: ExpertStore) -> tuple[float, int, float]:
        """(lambda with w readers at work, w, bytes a second) of this way to read."""
        key = (variant.cache, variant.packed)
        if key not in self._reads:
            calibrate_reads(store, repeats=2)  # checksums of first reads, page cache
            figures = calibrate_reads(store, repeats=9)
            rounds = -(-figures.batch // figures.width)
            self._reads[key] = (figures.batch_s[figures.width] / rounds, figures.width, figures.bytes_per_s)
        return self._reads[key]

    def _simulate(self, variant: Variant) -> tuple[np.ndarray, float, float]:
        """([counted tokens, layers] misses of this policy without prefetch, its hit rate, Belady's)."""
        layers, top_k = self.ids.shape[1:]
        experts = self.checkpoint.shape.num_experts
        misses: dict[str, np.ndarray] = {}
        for name in (variant.policy, "belady"):
            rows = []
            for position in range(layers):
                steps = self.ids[:, position].tolist()
                if name == "forecast":
                    policy = make_policy(name, experts)
                    rows.append(_misses_of(steps, variant.slots, policy))
                else:
                    table = Table(variant.slots, name, steps if name == "belady" else None)
                    rows.append([len(table.step(chosen)) for chosen in steps])
            misses[name] = np.array(rows).T[self.warm :]
        own, best = (1 - float(np.mean(misses[name])) / top_k for name in (variant.policy, "belady"))
        return misses[variant.policy], own, best


class _Stepper:
    """One KV cache, and the experts to run with."""

    def __init__(self, host: HostModel, layers: dict[int, ExpertLayer], executor: Dispatcher) -> None:
        self.layers = layers
        self.executor = executor
        self._host = host
        self._cache = make_prompt_cache(host.module)

    def step(self, token: int) -> mx.array:
        """Logits [vocabulary], evaluated."""
        logits = self._host(mx.array([[token]]), cache=self._cache)[0, -1]
        mx.eval(logits)
        return logits


class _Recorder(Dispatcher):
    """A dispatcher that keeps what the router chose."""

    def __init__(self, layers: Mapping[int, ExpertLayer], hidden_size: int, dtype: str) -> None:
        super().__init__(layers, [], hidden_size, dtype)
        self.chosen: list[np.ndarray] = []

    def execute(self, layer: int, x: mx.array, indices: mx.array, scores: mx.array | None = None) -> mx.array:
        self.chosen.append(np.array(indices).reshape(-1))
        return super().execute(layer, x, indices, scores)

    def trace(self, layers: int) -> np.ndarray:
        """[tokens, layers, K]"""
        return np.stack(self.chosen).reshape(-1, layers, len(self.chosen[0])).astype(np.int64)


def _item(token: mx.array) -> int:
    return int(token.item())  # type: ignore[arg-type]  # an integer array


def _counts(layer: ExpertLayer) -> tuple[float, ...]:
    counts = layer.table.counts
    return (
        counts.hits,
        counts.misses,
        counts.loads,
        counts.prefetched,
        counts.useful,
        counts.late,
        counts.stall_s,
    )


def _misses_of(steps: Sequence[Sequence[int]], slots: int, policy: EvictionPolicy) -> list[int]:
    table = SlotTable(slots, policy)
    found = []
    for chosen in steps:
        missing = table.look_up(chosen)
        table.reserve(missing, frozenset(chosen))
        for expert in missing:
            table.map(expert)
        found.append(len(missing))
    return found
