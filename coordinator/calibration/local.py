"""Node 0's own figures, on the thread that owns MLX: attention, the synchronisation, experts, the disk.

The whole-step figures come from real decode steps with the experts left out, answered from a scratch table without
asking, and answered from it with asking; differences of steps are what a layer costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.execution import SORT_AT_PAIRS, apply_rows
from titan.common.experts import ExpertLayer
from titan.common.package_power import package_power_w
from titan.common.registry import Checkpoint
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import ExpertStore, ReaderPool
from titan.common.store.layer_reads import LayerReads
from titan.coordinator.calibration.steps import DecodeSteps
from titan.coordinator.calibration.timing import Measured, measure, quiet_rounds
from titan.coordinator.moe.dispatch import Dispatcher

ROWS = (1, 4, 16, 64)
SCRATCH_BYTES = 1 << 30
READ_EXPERTS = 8
READERS = (1, 2, 4, 8)
READER_HELPS = 0.8  # more readers must bring at least this; less is noise
SLOW_S = 0.15


@dataclass(frozen=True, slots=True)
class LocalFigures:
    """Node 0, in seconds.

    Args:
        without: a step whose layers have no experts.
        layers: MoE layers of such a step.
        asked: one whose layers ask this machine alone, as a layer does that is not wholly at home.
        answered: one whose layers run the same experts without asking.
        compute: (pairs, seconds) of experts by themselves.
        page_cache, ssd: one expert from disk, cached and cold, by itself.
        missed: a step in each of whose layers `misses` experts are read out of the page cache; None where not measured.
        readers: that still help.
        power_w: package power while experts were computed; None where the system does not tell.
    """

    without: Measured
    layers: int
    asked: Measured
    answered: Measured
    compute: tuple[tuple[int, Measured], ...]
    page_cache: Measured
    ssd: Measured
    readers: int
    missed: Measured | None
    misses: int
    power_w: float | None = None


def measure_local(
    checkpoint: Checkpoint,
    store: ExpertStore,
    readers: ReaderPool,
    steps: DecodeSteps,
    scratch: ExpertLayer,
    dtype: str,
    report: Callable[[str], None],
) -> LocalFigures:
    """Measure node 0.

    Args:
        scratch: of `scratch_layer`, the table of every layer of `steps`.
    """
    shape = checkpoint.shape
    report("calibrating: experts")
    compute = tuple(_experts(scratch, shape.top_k, shape.hidden_size, dtype))
    folding = Folding(Dispatcher({spec.index: scratch for spec in shape.layers}, [], shape.hidden_size, dtype), scratch)
    power_w = package_power_w(lambda: steps.step(folding))
    report("calibrating: attention and synchronisation")

    def look(*, ask: bool) -> Measured:
        folding.ask = ask
        return steps.step(folding)

    seen = quiet_rounds(
        {"without": lambda: steps.step(None), "asked": lambda: look(ask=True), "answered": lambda: look(ask=False)}
    )
    report("calibrating: disk")
    cached, cold, helping = _reads(checkpoint, store, readers, scratch)
    missing = _missing(checkpoint, store, readers, dtype)
    return LocalFigures(
        without=seen["without"],
        layers=steps.layers,
        asked=seen["asked"],
        answered=seen["answered"],
        compute=compute,
        page_cache=cached,
        ssd=cold,
        readers=helping,
        missed=None if missing is None else quiet_rounds({"missed": lambda: steps.step(missing)})["missed"],
        misses=0 if missing is None else missing.misses,
        power_w=power_w,
    )


class Folding:
    """Executes every layer on the scratch table: expert e stands for e modulo its slots.

    Args:
        layer: the scratch table's own, where the dispatcher knows no other.
    """

    reduced = False

    def __init__(self, dispatcher: Dispatcher, scratch: ExpertLayer, layer: int | None = None) -> None:
        self.ask = True
        self._dispatcher, self._scratch, self._layer = dispatcher, scratch, layer

    def execute(self, layer: int, x: mx.array, indices: mx.array, scores: mx.array | None = None) -> mx.array:
        """x: [..., D], indices: [..., K] -> [..., K, D]; scores only as the dispatcher takes them."""
        folded = indices % self._scratch.buffers.capacity
        if self.ask:
            return self._dispatcher.execute(layer if self._layer is None else self._layer, x, folded, scores)
        return apply_rows(self._scratch.buffers, x, folded)

    def executed_at_home(self, pairs: int) -> None:
        self._dispatcher.executed_at_home(pairs)


class Missing:
    """Executes every layer on a table in which some of a row's experts are never found: two sets take turns."""

    reduced = False

    def __init__(self, dispatcher: Dispatcher, layer: int, stay: range, turns: tuple[range, range]) -> None:
        self.misses = len(turns[0])
        self._dispatcher, self._layer = dispatcher, layer
        self._chosen = [mx.array(np.array([*stay, *turn], np.uint32)) for turn in turns]
        self._turn = 0

    def execute(  # the protocol's arguments, not all of them used
        self,
        layer: int,  # noqa: ARG002
        x: mx.array,
        indices: mx.array,
        scores: mx.array | None = None,  # noqa: ARG002
    ) -> mx.array:
        """x: [..., D], indices: [..., K] -> [..., K, D]."""
        self._turn ^= 1
        return self._dispatcher.execute(self._layer, x, indices * 0 + self._chosen[self._turn])

    def executed_at_home(self, pairs: int) -> None:
        self._dispatcher.executed_at_home(pairs)


def _missing(checkpoint: Checkpoint, store: ExpertStore, readers: ReaderPool, dtype: str) -> Missing | None:
    """Half of a row's experts missing in each layer, read by the readers that decoding uses; None with too few."""
    shape = checkpoint.shape
    spec, misses = shape.layers[0], max(1, shape.top_k // 2)
    stay = range(shape.top_k - misses)
    first = range(len(stay), len(stay) + misses)
    second = range(first.stop, first.stop + misses)
    if second.stop > shape.num_experts:
        return None
    buffers = LayerBuffers(spec, shape.top_k, dtype)
    table = ExpertLayer(
        buffers, store.read_expert, None, readers, fill_many=store.read_experts, fill_cached=store.read_cached
    )
    return Missing(Dispatcher({spec.index: table}, [], shape.hidden_size, dtype), spec.index, stay, (first, second))


def scratch_layer(checkpoint: Checkpoint, store: ExpertStore, readers: ReaderPool, dtype: str) -> ExpertLayer:
    """A table of the first MoE layer with as many of its experts as SCRATCH_BYTES hold, at least top-k.

    It is never taken for whole: every layer that uses it asks.
    """
    shape = checkpoint.shape
    spec = shape.layers[0]
    one = LayerBuffers(spec, 1, dtype).nbytes
    slots = max(shape.top_k, min(shape.num_experts, SCRATCH_BYTES // one))
    layer = ExpertLayer(LayerBuffers(spec, slots, dtype), store.read_expert, None, readers)
    layer.pin(range(slots))
    layer.whole = False
    return layer


def _experts(scratch: ExpertLayer, top_k: int, hidden: int, dtype: str) -> list[tuple[int, Measured]]:
    """(pairs, seconds) for parts of one row's experts, then for 4, 16 and 64 rows."""
    rng = np.random.default_rng(0)
    slots = scratch.buffers.capacity
    found: list[tuple[int, Measured]] = []
    shares = sorted({1, max(1, top_k // 4), max(1, top_k // 2), top_k})
    for rows, a_row in [(1, k) for k in shares] + [(rows, top_k) for rows in ROWS[1:]]:
        x = mx.array(rng.standard_normal((rows, hidden)).astype(np.float32)).astype(COMPUTE_DTYPES[dtype][1])
        mx.eval(x)
        pair_rows = np.repeat(np.arange(rows, dtype=np.uint32), a_row)
        draws = [
            np.concatenate([rng.permutation(slots)[:a_row] for _ in range(rows)]).astype(np.uint32) for _ in range(8)
        ]
        turn = iter(range(1 << 30))

        def work(x: Any = x, pair_rows: Any = pair_rows, draws: Any = draws, turn: Any = turn) -> None:
            experts = draws[next(turn) % len(draws)]
            mx.eval(scratch.run_pairs(x, pair_rows, experts, sort=experts.size >= SORT_AT_PAIRS))
            scratch.forget_unevaluated()

        found.append((rows * a_row, measure(work)))
        if found[-1][1].median_s > SLOW_S:
            break  # larger batches follow the same line, and would take seconds a sample
    return found


def _reads(
    checkpoint: Checkpoint, store: ExpertStore, readers: ReaderPool, scratch: ExpertLayer
) -> tuple[Measured, Measured, int]:
    """Seconds an expert out of the page cache and cold, and how many readers still help."""
    shape = checkpoint.shape
    layer = shape.layers[0].index
    reads = LayerReads(shape.layers[0], store.read_expert, store.read_experts, store.read_cached, readers)
    slots = min(scratch.buffers.capacity, READ_EXPERTS, shape.num_experts)
    targets = [scratch.buffers.targets(slot) for slot in range(slots)]

    def read(expert: int, cold: bool) -> None:
        if cold:
            _evict(checkpoint, layer, expert)
        reads.read([expert], [targets[expert]], lambda _ended, _experts: None)

    for expert in range(slots):
        read(expert, cold=False)

    def cold_read(expert: int) -> None:
        _evict(checkpoint, layer, expert)
        store.read_expert(layer, expert, targets[expert])

    turn = iter(range(1 << 30))
    cached = measure(lambda: read(next(turn) % slots, cold=False))
    cold = measure(lambda: read(next(turn) % slots, cold=True), samples=9)
    best, best_s = 1, float("inf")
    for width in READERS:
        pool = ReaderPool(width)
        jobs = [partial(cold_read, expert) for expert in range(slots)]
        took = measure(lambda pool=pool, jobs=jobs: pool.run_all(jobs), samples=9)
        pool.close()
        if took.median_s < READER_HELPS * best_s:
            best, best_s = width, took.median_s
    return cached, cold, best


def _evict(checkpoint: Checkpoint, layer: int, expert: int) -> None:
    """Have the system forget an expert's pages, where it can be asked to (Linux)."""
    if not hasattr(os, "posix_fadvise"):
        return
    opened: dict[Any, int] = {}
    try:
        for part in checkpoint.ranges(layer, expert):
            if part.file not in opened:
                opened[part.file] = os.open(part.file, os.O_RDONLY)
            os.posix_fadvise(opened[part.file], part.offset, part.nbytes, os.POSIX_FADV_DONTNEED)
    finally:
        for fd in opened.values():
            os.close(fd)
