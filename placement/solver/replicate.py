"""Replicas in memory that would stay empty: workers' spare slots hold second copies, chosen by what dispatch gains.

A copy of one worker's expert on another evens the workers' loads; a copy of node 0's frequent expert lets a worker take
it when a round trip is paid anyway. Gains are measured by running dispatch on sampled routing. It knows arrangements.
"""

from __future__ import annotations

import time

import numpy as np

from titan.placement.arrangement import memory_used
from titan.placement.dispatch import choose
from titan.placement.evaluate import Evaluator, Ints
from titan.placement.routing import sample
from titan.placement.solver.classes import usable_bytes

ROWS = 300
NEAR = 1.2  # a worker this much farther than those a layer uses anyway gets no copy of that layer
HOME_SHARES = (0.0, 0.5, 1.0)
Replicas = dict[tuple[int, int], list[int]]


def replicate(evaluator: Evaluator, place: Ints, *, seed: int, deadline: float) -> tuple[Replicas, float]:
    """(replicas by (layer position, expert), seconds a step they save).

    Layers with experts on workers share the workers' spare slots evenly. Nothing is replicated where sampling shows no
    gain, and nothing after `deadline` (time.monotonic()).
    """
    problem = evaluator.problem
    used = memory_used(problem, place)
    free = [max(0, usable_bytes(problem, n) - int(u)) for n, u in enumerate(used)]
    layers = [i for i, row in enumerate(place) if (row > 0).any()]
    out: Replicas = {}
    saved, draws = 0.0, {}
    for done, layer in enumerate(layers):
        size, kind = problem.expert_bytes[layer], evaluator.kind[layer]
        quota = [0, *(f // size // (len(layers) - done) for f in free[1:])]
        if not any(quota) or time.monotonic() > deadline:
            continue
        if kind not in draws:
            draws[kind] = sample(evaluator.weights[layer], problem.top_k, ROWS, np.random.default_rng((seed, kind)))
        holders = _holders(place[layer])
        base, best, copies = mean_dispatch(evaluator, holders, draws[kind]), 0.0, {}
        for share in HOME_SHARES:
            tried = _copies(evaluator, layer, place[layer], quota, share)
            more = [tuple(sorted({*h, *tried.get(e, ())})) for e, h in enumerate(holders)]
            gain = base - mean_dispatch(evaluator, more, draws[kind])
            if gain > best + 1e-12:
                best, copies = gain, tried
        saved += best
        for expert, nodes in copies.items():
            out[layer, expert] = nodes
            for n in nodes:
                free[n] -= size
    return out, saved


def mean_dispatch(evaluator: Evaluator, holders: list[tuple[int, ...]], ids: Ints) -> float:
    """Mean seconds of a layer's experts over sampled rows `ids` [rows, K] when dispatch chooses."""
    total = sum(choose(row, holders, evaluator.costs).latency_s for row in ids.tolist())
    return total / len(ids)


def _holders(row: Ints) -> list[tuple[int, ...]]:
    return [(n,) if n >= 0 else () for n in row.tolist()]


def _copies(evaluator: Evaluator, layer: int, row: Ints, quota: list[int], home_share: float) -> dict[int, list[int]]:
    """Copies within `quota` slots a node: that share of node 0's most frequent experts, then of the workers'."""
    weights, left = evaluator.weights[layer], list(quota)
    order = np.argsort(-weights, kind="stable")
    home = [int(e) for e in order if row[e] == 0][: int(sum(quota) * home_share)]
    remote = [int(e) for e in order if row[e] > 0]
    load = np.array([float(weights[row == n].sum()) * evaluator.costs.pair_s[n] for n in range(len(quota))])
    base = evaluator.costs.base_s
    reach = NEAR * max(base[n] for n in np.unique(row[row > 0]))
    out: dict[int, list[int]] = {}
    for expert in [*home, *remote]:
        open_ = [n for n in range(1, len(left)) if left[n] > 0 and n != row[expert] and base[n] <= reach]
        if not open_:
            continue
        node = min(open_, key=lambda n: (load[n], n))
        out[expert] = [node]
        left[node] -= 1
        load[node] += weights[expert] * evaluator.costs.pair_s[node] / 2
    return out
