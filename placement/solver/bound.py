"""The certified lower bound of a problem: tables for its kinds of layers, then the dual. Knows no arrangement."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from titan.placement.evaluate import Evaluator
from titan.placement.solver.classes import WorkerClass, usable_bytes
from titan.placement.solver.dual import Dual, Group, solve_dual
from titan.placement.solver.layer_bound import INTERVALS, LayerBound
from titan.placement.solver.outcome import Outcomes

FEW_KINDS = 4
MAX_TOP_K = 16


def layer_kinds(evaluator: Evaluator) -> dict[tuple[tuple[float, ...], int], list[int]]:
    """Layer positions by (sorted weights, expert bytes): layers of a kind have the same bound tables."""
    kinds: dict[tuple[tuple[float, ...], int], list[int]] = {}
    known: dict[int, tuple[float, ...]] = {}
    for layer, size in enumerate(evaluator.problem.expert_bytes):
        kind = evaluator.kind[layer]
        if kind not in known:
            known[kind] = tuple(sorted(round(float(w), 9) for w in evaluator.weights[layer]))
        kinds.setdefault((known[kind], size), []).append(layer)
    return kinds


def lower_bound(evaluator: Evaluator, classes: list[WorkerClass], deadline: float) -> tuple[float, Dual]:
    """(seconds no plan's expected step at batch 1 goes below, the dual it comes from). See `solve_dual`.

    The tables grow with K^2 E^2: above MAX_TOP_K the bound is what no placement changes, attention and the rest.
    """
    problem, costs = evaluator.problem, evaluator.costs
    if problem.top_k > MAX_TOP_K:
        return evaluator.fixed_s, Dual(0.0, np.zeros(1 + len(classes)), [], np.zeros(0))
    workers = [n for c in classes for n in c.members]
    outcomes = Outcomes(costs, workers, problem.top_k)
    tails = [[n for c in classes[i:] for n in c.members] for i in range(1, len(classes))]
    deep = [outcomes.deep(costs, tail) for tail in [*tails, []]]
    kinds = layer_kinds(evaluator)
    steps = _replica_steps(problem.num_experts, fine=len(kinds) <= FEW_KINDS) if len(workers) > 1 else [(0, 0), (1, 1)]
    intervals = INTERVALS if len(kinds) <= FEW_KINDS else INTERVALS // 2
    groups = []
    for (_, size), layers in kinds.items():
        weights = evaluator.weights[layers[0]]
        table = LayerBound(weights, outcomes, problem.top_k, len(workers), deep, steps, problem.sync_s, intervals)
        groups.append(Group(table, len(layers), size))
    capacity = [float(usable_bytes(problem, 0)), *(float(c.capacity_bytes) for c in classes)]
    dual = solve_dual(groups, capacity, deadline)
    return evaluator.fixed_s + dual.bound_s * (1 - 1e-9), dual


def _replica_steps(experts: int, *, fine: bool) -> list[tuple[int, int]]:
    """(least extra slots, extra slots assumed): rising cuts, so that few replicas are not taken for many."""
    cuts = (
        {0, 1, 2, 3, 4, 6, 8, 12, 16, 24} | {experts // d for d in (16, 12, 8, 6, 5, 4, 3, 2)}
        if fine
        else {0, 2, 8, experts // 8}
    )
    cuts = sorted({c for c in cuts if c <= experts} | {experts})
    return [(0, 0), *((low + 1, high) for low, high in pairwise(cuts))]
