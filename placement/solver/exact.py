"""Proven optima of small problems by HiGHS, to measure the search against. Too slow for anything else.

Both programs have the search's objective, the exact expected step without replicas. `by_counts` lists every split of a
layer by counts (equal frequencies make experts exchangeable); `by_routing` lists every routing of a layer (any
frequencies, few experts). They know problems, not how the search works.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from titan.placement.evaluate import MISS, Evaluator
from titan.placement.solver.highs import INFINITY, Highs


def by_counts(evaluator: Evaluator) -> float:
    """Optimal expected step in seconds of a problem with equal frequencies."""
    problem = evaluator.problem
    experts, nodes, keep = problem.num_experts, len(problem.nodes), min(problem.top_k, problem.num_experts)
    highs = Highs()
    highs.setOptionValue("mip_rel_gap", 1e-6)
    for _ in problem.layers:
        highs.row(1.0, 1.0)
    for node in problem.nodes:
        highs.row(-INFINITY, node.memory_bytes / max(problem.expert_bytes))
    costs: dict[tuple[int, ...], float] = {}
    for layer, size in enumerate(problem.expert_bytes):
        for counts in _splits(experts, nodes + 1):
            if counts[1] < keep:
                continue
            if counts not in costs:
                costs[counts] = evaluator.layer(layer, np.repeat(np.arange(MISS, nodes), counts))
            terms = {layer: 1.0}
            for node in range(nodes):
                terms[len(problem.layers) + node] = counts[node + 1] * size / max(problem.expert_bytes)
            highs.column(costs[counts], 1.0, terms, whole=True)
    highs.run()
    return evaluator.fixed_s + highs.getInfo().objective_function_value


def _splits(total: int, parts: int):
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


def by_routing(evaluator: Evaluator, limit_s: float) -> tuple[float, bool]:
    """(expected step in seconds of the best arrangement found, whether it is proven optimal).

    Readers must be 1 or at least top-k, so that the stall is linear in the misses or in "some miss".
    """
    problem, costs = evaluator.problem, evaluator.costs
    experts, nodes, top_k = problem.num_experts, len(problem.nodes), problem.top_k
    if 1 < costs.readers < top_k:
        raise ValueError("readers must be 1 or at least top-k")
    highs = Highs()
    highs.setOptionValue("time_limit", limit_s)
    highs.setOptionValue("mip_rel_gap", 1e-4)
    memory: list[dict[int, float]] = [{} for _ in problem.nodes]
    for layer, size in enumerate(problem.expert_bytes):
        x = [[highs.column(0.0, 1.0, whole=True) for _ in range(nodes + 1)] for _ in range(experts)]
        for row in x:
            highs.row(1.0, 1.0, dict.fromkeys(row, 1.0))
            for node in range(nodes):
                memory[node][row[node + 1]] = size / max(problem.expert_bytes)
        highs.row(float(min(top_k, experts)), INFINITY, {row[1]: 1.0 for row in x})
        split = highs.column(problem.sync_s, 1.0)
        for row in x:
            highs.row(1.0, INFINITY, {split: 1.0, row[1]: 1.0})
        weights = evaluator.weights[layer]
        chosen = list(itertools.combinations(range(experts), top_k))
        chance = np.array([math.prod(weights[list(s)]) for s in chosen])
        for s, p in zip(chosen, chance / chance.sum(), strict=True):
            _routing(highs, evaluator, [x[e] for e in s], float(p))
    for node, terms in zip(problem.nodes, memory, strict=True):
        highs.row(-INFINITY, node.memory_bytes / max(problem.expert_bytes), terms)
    highs.run()
    return evaluator.fixed_s + highs.getInfo().objective_function_value, highs.is_optimal()


def _routing(highs: Highs, evaluator: Evaluator, rows: list[list[int]], chance: float) -> None:
    """Cost of one routing: span over every node's time, and the stall."""
    costs, span = evaluator.costs, highs.column(chance)
    for node in range(len(evaluator.problem.nodes)):
        used = highs.column(0.0, 1.0)
        columns = [c for row in rows for c in ((row[0], row[1]) if node == 0 else (row[node + 1],))]
        for column in columns:
            highs.row(0.0, INFINITY, {used: 1.0, column: -1.0})
        terms = {span: 1.0, used: -costs.base_s[node]} | dict.fromkeys(columns, -costs.pair_s[node])
        highs.row(0.0, INFINITY, terms)
    if costs.readers == 1:
        for row in rows:
            highs.changeColCost(row[0], _cost(highs, row[0]) + chance * costs.ssd_s)
    else:
        stall = highs.column(chance * costs.ssd_s, 1.0)
        for row in rows:
            highs.row(0.0, INFINITY, {stall: 1.0, row[0]: -1.0})


def _cost(highs: Highs, column: int) -> float:
    return float(highs.getLp().col_cost_[column])
