"""Choosing a pattern for every layer: how many experts stay local, go to each class of workers, to the SSD.

Patterns get their exact expected cost; an integer program over them (HiGHS) divides the memory. It knows counts and
prices, the experts behind them are `realise`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from titan.placement.evaluate import Evaluator, Ints
from titan.placement.solver.bound import layer_kinds
from titan.placement.solver.classes import WorkerClass, usable_bytes
from titan.placement.solver.highs import INFINITY, Highs
from titan.placement.solver.pricing import Column
from titan.placement.solver.realise import Builder, Shares, arrange

Pattern = tuple[int, tuple[int, ...], int]  # local slots, experts a class, frequent experts that go to workers first


def construct(
    evaluator: Evaluator, classes: list[WorkerClass], columns: Iterable[Column], deadline: float, *, effort: int = 2
) -> Ints:
    """An arrangement [layers, E] within every node's memory, from the best mix of patterns."""
    problem = evaluator.problem
    kinds = list(layer_kinds(evaluator).items())
    demand = _demand(evaluator, classes)
    shares = Shares(evaluator, classes, demand)
    wanted: list[set[Pattern]] = [set() for _ in kinds]
    for column in columns:
        used = sum(column.workers)
        scale = (problem.num_experts - column.home - column.missing) / used if used else 0.0
        counts = tuple(int(w * scale) for w in column.workers)
        for skipped in _skips(evaluator, classes, sum(counts)):
            wanted[column.kind].add((column.home, counts, skipped))
    coarse = len(kinds) > 4 or len(problem.nodes) > 16
    room = np.full(len(problem.nodes), problem.num_experts, dtype=np.int64)
    options: list[list[tuple[Pattern, float]]] = []
    for (_, layers), extra in zip(kinds, wanted, strict=True):
        choices = sorted(extra | set(_grid(evaluator, classes, coarse=coarse or effort < 2)))
        costed = []
        for local, workers, skipped in choices:
            carry = [np.zeros(len(c.members)) for c in classes]
            row, _ = arrange(evaluator, classes, shares, layers[0], local, workers, skipped, carry, room)
            costed.append(((local, workers, skipped), evaluator.layer(layers[0], row)))
            if time.monotonic() > deadline and len(costed) > 2:
                break
        options.append(costed)
    counts = _mix(
        evaluator, classes, kinds, options, max(0.1, min(6.0 if effort > 1 else 1.5, deadline - time.monotonic()))
    )
    builder = Builder(evaluator, classes, shares)
    chosen: list[tuple[int, Pattern]] = []
    for ((_, _), layers), costed, taken in zip(kinds, options, counts, strict=True):
        patterns = [pattern for (pattern, _), n in zip(costed, taken, strict=True) for _ in range(n)]
        patterns.sort(key=lambda p: (-p[0], p[1]))
        chosen += list(zip(layers, patterns, strict=True))
    for layer, pattern in sorted(chosen):
        builder.layer(layer, *pattern)
    return builder.place


def _demand(evaluator: Evaluator, classes: list[WorkerClass]) -> list[float]:
    """Bytes each class will about hold: what does not fit home, nearest classes first."""
    problem = evaluator.problem
    left = float(sum(problem.expert_bytes) * problem.num_experts - usable_bytes(problem, 0))
    out = []
    for group in classes:
        out.append(max(0.0, min(left, group.capacity_bytes)))
        left -= out[-1]
    return out


def _grid(evaluator: Evaluator, classes: list[WorkerClass], *, coarse: bool) -> Iterable[Pattern]:
    problem = evaluator.problem
    experts, least = problem.num_experts, min(problem.top_k, problem.num_experts)
    yield experts, (0,) * len(classes), 0
    steps = 2 if coarse else 8
    locals_ = {least + (experts - least) * i // steps for i in range(steps)} | {experts - 1, experts - 2}
    missing = (0.0, 0.5, 1.0) if coarse else (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
    for local in sorted(t for t in locals_ if least <= t < experts):
        for share in missing:
            away = round((experts - local) * (1 - share))
            for parts in _splits(evaluator, classes):
                for skipped in _skips(evaluator, classes, away):
                    yield local, _divide(away, parts), skipped


def _skips(evaluator: Evaluator, classes: list[WorkerClass], away: int) -> list[int]:
    """How many of the most frequent experts workers might get: only where a worker can be done before node 0."""
    costs = evaluator.costs
    home_s = costs.base_s[0] + evaluator.top_k * costs.pair_s[0]
    if all(evaluator.flat) or not away or not classes or classes[0].theta_s >= home_s:
        return [0]
    return sorted({0, away // 8, away // 3, away})


def _splits(evaluator: Evaluator, classes: list[WorkerClass]) -> list[list[float]]:
    """Proportions over the classes: each alone; the nearest i together by memory, by members and by speed."""
    count, out = len(classes), []
    for i in range(count):
        out.append([float(j == i) for j in range(count)])
        if i:
            speed = [sum(1 / max(evaluator.costs.pair_s[n], 1e-12) for n in c.members) for c in classes]
            for basis in ([c.capacity_bytes for c in classes], [len(c.members) for c in classes], speed):
                out.append([float(b) if j <= i else 0.0 for j, b in enumerate(basis)])
    return out or [[]]


def _divide(total: int, parts: list[float]) -> tuple[int, ...]:
    if not parts:
        return ()
    edges = np.round(np.cumsum(parts) / sum(parts) * total).astype(int)
    return tuple(int(b - a) for a, b in zip([0, *edges[:-1]], edges, strict=True))


def _mix(evaluator: Evaluator, classes: list[WorkerClass], kinds, options, limit_s: float) -> list[list[int]]:
    """How many layers of each kind take each pattern: min cost under the memory of node 0 and of the classes."""
    problem = evaluator.problem
    unit = max(problem.expert_bytes)
    capacity = [usable_bytes(problem, 0), *(c.capacity_bytes for c in classes)]
    highs = Highs()
    highs.setOptionValue("time_limit", limit_s)
    highs.setOptionValue("mip_rel_gap", 1e-4)
    for _, layers in kinds:
        highs.row(float(len(layers)), float(len(layers)))
    for bytes_ in capacity:
        highs.row(-INFINITY, bytes_ / unit)
    for kind, (((_, size), layers), costed) in enumerate(zip(kinds, options, strict=True)):
        for (local, workers, _), cost in costed:
            terms = {kind: 1.0}
            for i, used in enumerate((max(local, problem.top_k), *workers)):
                terms[len(kinds) + i] = size / unit * used
            highs.column(cost, float(len(layers)), terms, whole=True)
    highs.run()
    solution = highs.values()
    out, at = [], 0
    for (_, layers), costed in zip(kinds, options, strict=True):
        taken = np.rint(solution[at : at + len(costed)]).astype(int) if len(solution) else np.zeros(len(costed), int)
        at += len(costed)
        out.append(_complete(taken, costed, len(layers), problem.top_k))
    return out


def _complete(taken, costed, layers: int, top_k: int) -> list[int]:
    """When HiGHS stopped without a solution: the pattern that uses least memory for every layer."""
    if int(taken.sum()) == layers:
        return taken.tolist()
    least = min(range(len(costed)), key=lambda i: (max(costed[i][0][0], top_k), sum(costed[i][0][1])))
    return [layers if i == least else 0 for i in range(len(costed))]
