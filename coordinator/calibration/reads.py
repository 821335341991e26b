"""A worker's own disk as node 0 sees it: what one read takes (lambda_n), and how many at once still help (w_n).

Distinct experts of one layer are asked for, each once; the worker's replies say how long it read. Whether they come
from its disk or its page cache is as in serving: the worker's read mode and what was read there lately decide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.registry import ModelShape
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.coordinator.calibration.timing import Measured
from titan.coordinator.moe.workers import Worker
from titan.coordinator.remote.exchange import Exchange, Outstanding
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.share import Cache

ALONE, TOGETHER = 8, 4  # reads of one expert, and of as many as the cache has slots
FIRST_ID = 1 << 60  # no other request has such an id
DEADLINE_S = 35.0  # a disk that sleeps may take a read's whole deadline


@dataclass(frozen=True, slots=True)
class ReadFigures:
    """`one`: seconds that a request waits for one missing expert; `readers`: reads at once that still help."""

    one: Measured
    readers: int


def cache_to_measure(experts: Sequence[int], slots: int) -> Cache | None:
    """A cache and the experts to read into it, in a mixed order, of those that it may read; None with too few."""
    wanted = min(len(experts), ALONE + TOGETHER * slots)
    if slots < 1 or wanted < 1:
        return None
    mixed = np.random.default_rng(0).permutation(np.array(experts))  # neighbours would be read in one call
    return Cache(slots, tuple(int(e) for e in mixed[:wanted]))


def measure_reads(worker: Worker, layer: int, cache: Cache, shape: ModelShape, dtype: str) -> ReadFigures | None:
    """Have a worker read what it serves of `cache`, installed before; None when it fails, or nothing was read."""
    session = worker.ready
    if session is None:
        return None
    served = session.served.get(layer, frozenset())
    experts = [e for e in cache.experts if e in served]
    alone = min(ALONE, -(-len(experts) // 2))
    exchange, times = Exchange(FIRST_ID), ReplyTimes(DEADLINE_S, 0.0)

    def read_s(asked: list[int]) -> float | None:
        call = ExecuteCall(
            request_id=exchange.next_id(),
            layer=layer,
            activations=np.zeros((1, shape.hidden_size), COMPUTE_DTYPES[dtype][0]),
            pair_rows=np.zeros(len(asked), np.uint32),
            pair_experts=np.array(asked, np.uint32),
            sort=False,
            deadline_s=DEADLINE_S,
        )
        loads: list[float] = []

        def take(_: Outstanding, result: ExecuteResult) -> None:
            loads.append(result.load_us / 1e6)

        exchange.send(session.transport, call, np.arange(len(asked)), times)
        return None if exchange.collect(take) or not loads else loads[0]

    singles = [read_s([expert]) for expert in experts[:alone]]
    groups = [
        read_s(experts[at : at + cache.slots])
        for at in range(alone, len(experts) - cache.slots + 1, cache.slots)
        if cache.slots > 1
    ]
    return figures_of_reads(singles, groups, cache.slots)


def figures_of_reads(singles: Sequence[float | None], groups: Sequence[float | None], size: int) -> ReadFigures | None:
    """From seconds of reads of one expert, and of `size` together; None in them is a request that failed."""
    if None in singles or None in groups or not any(singles):
        return None
    low, median, high = (float(q) for q in np.quantile(np.array(singles, float), (0.25, 0.5, 0.75)))
    if median <= 0:
        return None
    together_s = float(np.median(np.array(groups, float))) if groups else 0.0
    readers = max(1, min(size, int(size * median / together_s))) if together_s > 0 else 1
    return ReadFigures(Measured(median, (high - low) / median, len(singles)), readers)
