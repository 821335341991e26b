"""Node 0's own figures, on the thread that owns MLX: attention, the synchronisation, experts, the disk.

The whole-step figures come from real decode steps with the experts left out, answered from a scratch table without
asking, and answered from it with asking; differences of steps are what a layer costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.execution import SORT_AT_PAIRS, apply_rows
from titan.common.experts import ExpertLayer
from titan.common.platform import every_core
from titan.common.registry import Checkpoint
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import ExpertStore
from titan.coordinator.calibration.timing import Measured, measure
from titan.coordinator.host.model import HostModel
from titan.coordinator.moe.dispatch import Dispatcher

ROWS = (1, 4, 16, 64)
SCRATCH_BYTES = 1 << 30
READ_EXPERTS = 8
READERS = (1, 2, 4, 8)
SLOW_S = 0.15
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class LocalFigures:
    """Node 0: seconds a layer of attention, a layer's synchronisation, (pairs, seconds) of experts, reads, readers."""

    attention_s: Measured
    sync_s: float
    whole_layer_s: float
    compute: tuple[tuple[int, Measured], ...]
    page_cache_s: Measured
    ssd_s: Measured
    readers: int


def measure_local(
    checkpoint: Checkpoint, store: ExpertStore, model: HostModel, dtype: str, report: Callable[[str], None]
) -> LocalFigures:
    """Measure node 0. Leaves the model unbound."""
    shape = checkpoint.shape
    layers = len(shape.layers)
    report("calibrating: experts")
    scratch = _scratch(checkpoint, store, dtype)
    compute = tuple(_experts(scratch, shape.top_k, shape.hidden_size, dtype))
    report("calibrating: attention and synchronisation")
    tables = {spec.index: scratch for spec in shape.layers}
    dispatcher = Dispatcher(tables, [], shape.hidden_size, dtype)
    folding = _Folding(dispatcher, scratch)
    scratch.whole = False
    # Rounds, and the quietest of each: for seconds on end something else may take half of this machine.
    looks: dict[str, list[Measured]] = {"without": [], "asked": [], "answered": []}
    for _ in range(ROUNDS):
        model.unbind()
        looks["without"].append(_step(model))
        model.bind(tables, folding)
        for name, folding.ask in (("asked", True), ("answered", False)):
            looks[name].append(_step(model))
    without, asked, answered = (min(found, key=lambda m: m.median_s) for found in looks.values())
    model.unbind()
    report("calibrating: disk")
    cached, cold, readers = _reads(checkpoint, store, scratch)
    return LocalFigures(
        attention_s=Measured(without.median_s / layers, without.spread, without.samples),
        sync_s=max(0.0, (asked.median_s - answered.median_s) / layers),
        whole_layer_s=max(0.0, (answered.median_s - without.median_s) / layers),
        compute=compute,
        page_cache_s=cached,
        ssd_s=cold,
        readers=readers,
    )


class _Folding:
    """Executes every layer on the scratch table: expert e stands for e modulo its slots."""

    def __init__(self, dispatcher: Dispatcher, scratch: ExpertLayer) -> None:
        self.ask = True
        self._dispatcher = dispatcher
        self._scratch = scratch

    def execute(self, layer: int, x: mx.array, indices: mx.array) -> mx.array:
        folded = indices % self._scratch.buffers.capacity
        if self.ask:
            return self._dispatcher.execute(layer, x, folded)
        return apply_rows(self._scratch.buffers, x, folded)

    def executed_at_home(self, pairs: int) -> None:
        self._dispatcher.executed_at_home(pairs)


def _scratch(checkpoint: Checkpoint, store: ExpertStore, dtype: str) -> ExpertLayer:
    """A table of the first MoE layer with as many of its experts as SCRATCH_BYTES hold, at least top-k."""
    shape = checkpoint.shape
    spec = shape.layers[0]
    one = LayerBuffers(spec, 1, dtype).nbytes
    slots = max(shape.top_k, min(shape.num_experts, SCRATCH_BYTES // one))
    layer = ExpertLayer(LayerBuffers(spec, slots, dtype), store.read_expert)
    layer.pin(range(slots))
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


def _step(model: HostModel) -> Measured:
    """One greedy decode step after a short prompt."""
    cache = make_prompt_cache(model.module)
    mx.eval(model(mx.array([[1, 2, 3, 4, 5, 6, 7, 8]]), cache=cache))

    def work() -> None:
        mx.eval(mx.argmax(model(mx.array([[9]]), cache=cache)[:, -1, :], axis=-1))

    return measure(work, samples=25, budget_s=0.5)


def _reads(checkpoint: Checkpoint, store: ExpertStore, scratch: ExpertLayer) -> tuple[Measured, Measured, int]:
    """Seconds an expert out of the page cache and cold, and how many readers still help."""
    shape = checkpoint.shape
    layer = shape.layers[0].index
    slots = min(scratch.buffers.capacity, READ_EXPERTS, shape.num_experts)
    targets = [scratch.buffers.targets(slot) for slot in range(slots)]

    def read(expert: int, cold: bool) -> None:
        if cold:
            _evict(checkpoint, layer, expert)
        store.read_expert(layer, expert, targets[expert])

    for expert in range(slots):
        read(expert, cold=False)
    turn = iter(range(1 << 30))
    cached = measure(lambda: read(next(turn) % slots, cold=False))
    cold = measure(lambda: read(next(turn) % slots, cold=True), samples=9)
    best, best_s = 1, float("inf")
    for width in READERS:
        with every_core(), ThreadPoolExecutor(width) as pool:
            took = measure(lambda pool=pool: list(pool.map(lambda e: read(e, cold=True), range(slots))), samples=5)
        if took.median_s < 0.9 * best_s:
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
