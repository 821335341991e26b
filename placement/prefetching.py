"""Prefetching under a trace: what a predictor at depth d would have hidden of the misses, by (8).

Predictors here are the plain ones planning needs; any function of the same form can be replayed. It knows sequences of
expert ids and times, no reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from titan.placement.simulate import Table
from titan.placement.trace import Trace

Predictor = Callable[[int, int], Sequence[int]]
"""(row, moe layer position) -> experts predicted for it, from what was known `depth` layers earlier."""


@dataclass(frozen=True, slots=True)
class PrefetchRun:
    """Replay of one predictor: hit rate of the tables, recall among the misses (r'), precision (q), stall a row."""

    hit_rate: float
    recall: float
    precision: float
    stall_s: float


def previous_row(trace: Trace) -> Predictor:
    """Predicts what the previous row selected in the same layer."""
    return lambda row, layer: trace.ids[row - 1, layer].tolist() if row else []


def transition(trace: Trace, depth: int, count: int) -> Predictor:
    """Predicts the `count` experts that most often followed the experts of layer l - depth, learned as rows pass."""
    experts = trace.header.num_experts
    seen = np.zeros((trace.ids.shape[1], experts, experts), dtype=np.float32)
    learned = [-1]

    def predict(row: int, layer: int) -> Sequence[int]:
        while learned[0] < row - 1:
            learned[0] += 1
            ids = trace.ids[learned[0]].astype(np.int64)
            for at in range(depth, len(ids)):
                seen[at][np.ix_(ids[at - depth], ids[at])] += 1
        if layer < depth or row == 0:
            return []
        score = seen[layer][trace.ids[row, layer - depth].astype(np.int64)].sum(axis=0)
        return np.argpartition(-score, count - 1)[:count].tolist()

    return predict


def oracle(trace: Trace) -> Predictor:
    """Predicts exactly what comes: the most any predictor could do."""
    return lambda row, layer: trace.ids[row, layer].tolist()


def run_prefetch(
    trace: Trace,
    capacity: int,
    predictor: Predictor,
    *,
    depth: int,
    fetch_s: float,
    readers: int,
    layer_s: float,
    policy: str = "lru",
) -> PrefetchRun:
    """Replay all layers with tables of `capacity` slots; each row's stall is (8) with that row's misses.

    Args:
        depth: layers of lead (d); the lead time is depth * layer_s.
        fetch_s: lambda of the tier the misses come from.
        layer_s: decode time of a layer (tau_l).
    """
    rows, layers, top_k = trace.ids.shape
    steps = [trace.ids[:, i].tolist() for i in range(layers)]
    tables = [Table(capacity, policy, steps[i] if policy == "belady" else None) for i in range(layers)]
    missed = hidden = predicted = right = 0
    stall = 0.0
    late = max(0.0, fetch_s - depth * layer_s)
    for row in range(rows):
        for layer in range(layers):
            guess = set(predictor(row, layer))
            missing = tables[layer].step(steps[layer][row])
            seen = sum(e in guess for e in missing)
            missed += len(missing)
            hidden += seen
            predicted += len(guess)
            right += sum(e in guess for e in steps[layer][row])
            stall += -(-(len(missing) - seen) // readers) * fetch_s + -(-seen // readers) * late
    accesses = max(1, rows * layers * top_k)
    return PrefetchRun(1 - missed / accesses, hidden / max(1, missed), right / max(1, predicted), stall / max(1, rows))
