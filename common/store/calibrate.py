"""Measuring a store: seconds an expert (lambda) for several widths of the reader pool, and the width that helps (w).

Reads real experts into memory of its own. Knows no slots.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan.common.arrays import DISK_DTYPES
from titan.common.store.expert_store import ExpertStore
from titan.common.store.readers import ReaderPool

__all__ = ["ReadFigures", "calibrate_reads"]

WIDTHS = (1, 2, 4, 8)
WORTH = 1.08  # a wider pool must be faster by this factor


@dataclass(frozen=True, slots=True)
class ReadFigures:
    """Medians.

    Args:
        fetch_s: one expert, alone (lambda).
        batch_s: width -> seconds for `batch` experts asked for at once.
        width: the narrowest pool that is nearly as fast as any (w).
        bytes_per_s: of the batch at that width.
    """

    fetch_s: float
    batch: int
    batch_s: dict[int, float]
    width: int
    bytes_per_s: float


def calibrate_reads(
    store: ExpertStore, *, batch: int = 8, repeats: int = 5, widths: Sequence[int] = WIDTHS, seed: int = 0
) -> ReadFigures:
    """Read random experts. With the page cache in use, what is measured is what it happens to hold.

    Raises:
        StoreError, CheckpointChanged: as `read_expert`.
    """
    shape = store.checkpoint.shape
    random = np.random.default_rng(seed)
    components = [c for matrix in shape.layers[0].matrices for c in matrix.components]
    memory = [[np.zeros(c.shape, DISK_DTYPES[c.dtype][0]) for c in components] for _ in range(batch)]
    pack = store.checkpoint.pack
    held = [
        (spec.index, expert)
        for spec in shape.layers
        if spec.matrices == shape.layers[0].matrices
        for expert in (range(shape.num_experts) if pack is None else pack.checksums.get(spec.index, ()))
    ]

    def draw(count: int) -> list[tuple[int, int]]:
        return [held[i] for i in random.choice(len(held), count, replace=count > len(held))]

    alone = []
    for layer, expert in draw(2 * repeats):
        start = time.perf_counter()
        store.read_expert(layer, expert, memory[0])
        alone.append(time.perf_counter() - start)
    batch_s = {}
    for width in widths:
        pool = ReaderPool(width)
        times = []
        for repeat in range(repeats + 1):
            jobs = [
                lambda layer=layer, expert=expert, views=views: store.read_expert(layer, expert, views)
                for (layer, expert), views in zip(draw(batch), memory, strict=True)
            ]
            start = time.perf_counter()
            pool.run_all(jobs)
            if repeat:  # the first starts the threads
                times.append(time.perf_counter() - start)
        pool.close()
        batch_s[width] = statistics.median(times)
    best = min(batch_s.values())
    width = next(w for w, seconds in sorted(batch_s.items()) if seconds <= best * WORTH)
    nbytes = batch * shape.layers[0].expert_bytes
    return ReadFigures(statistics.median(alone), batch, batch_s, width, nbytes / batch_s[width])
