"""The certified lower bound of a problem: tables for its kinds of layers, then the dual. Knows no arrangement."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from titan.placement.evaluate import Evaluator
from titan.placement.solver.classes import WorkerClass, usable_bytes, worker_classes
from titan.placement.solver.dual import Dual, Group, solve_dual
from titan.placement.solver.layer_bound import LayerBound
from titan.placement.solver.outcome import Outcomes
from titan.placement.solver.reach import INTERVALS
from titan.placement.solver.rooms import levels, own_levels, split

Floats = NDArray[np.float64]
CLASSES = (3, 5)
TABLE_BYTES = 256 << 20  # of the largest array: beyond, only what no placement changes is proven
FINE_WORK, FULL_WORK = 4.0, 16.0  # kinds of layers times (E / 256)^2
CUTS = (0, 2, 8, 30)


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds no plan's expected step goes below; the classes of workers and the dual that suit the construction."""

    bound_s: float
    classes: list[WorkerClass]
    dual: Dual


@dataclass(frozen=True, slots=True)
class Effort:
    """How fine the tables are.

    Args:
        own: whether a class's own room is looked at beside that of all workers.
        limited: buckets of second holders for which node 0's room is looked at.
        intervals: see `reach`.
        buckets: (least, assumed) experts with a second holder.
        possible: whether the tables fit in memory at all.
    """

    own: bool
    limited: int
    intervals: int
    buckets: list[tuple[int, int]]
    possible: bool

    @staticmethod
    def of(evaluator: Evaluator) -> Effort:
        experts, top_k = evaluator.problem.num_experts, evaluator.top_k
        kinds = len(layer_kinds(evaluator))
        work = kinds * (experts / 256) ** 2
        fine = work <= FINE_WORK
        cuts = sorted({min(c, experts) for c in (*(CUTS if fine else CUTS[:3:2]), experts)})
        buckets = [(0, 0), *((low + 1, high) for low, high in pairwise(cuts))]
        fits = 8 * (experts + 1) ** 2 * (top_k + 1) <= TABLE_BYTES
        fits = fits and 8 * (experts + 1) ** 2 * kinds * 8 <= 4 * TABLE_BYTES
        return Effort(fine, 3 if fine else 1 if work <= FULL_WORK else 0, INTERVALS if fine else 4, buckets, fits)


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


def lower_bound(evaluator: Evaluator, deadline: float) -> Bound:
    """No plan's expected step at batch 1 is shorter, see `docs/placement.md` for what is assumed.

    Workers are divided into few classes first, then into more: which is tighter depends on how they differ. Stops at
    `deadline` (time.monotonic()) with what is proven by then.
    """
    effort = Effort.of(evaluator)
    best: Bound | None = None
    for limit in CLASSES:
        classes = worker_classes(evaluator.problem, evaluator.costs, limit)
        if best is not None and (time.monotonic() > deadline or len(classes) == len(best.classes)):
            break
        start = None if best is None else _inherited(best, classes)
        dual = _bound_with(evaluator, classes, effort, deadline, start)
        if best is None:
            best = Bound(dual.bound_s, classes, dual)
        elif dual.bound_s > best.bound_s:
            best = replace(best, bound_s=dual.bound_s)
    assert best is not None
    return replace(best, bound_s=evaluator.fixed_s + best.bound_s * (1 - 1e-9))


def _inherited(coarse: Bound, classes: list[WorkerClass]) -> Floats:
    """Prices of the coarse classes for the fine ones."""
    of = {n: float(p) for c, p in zip(coarse.classes, coarse.dual.prices[1:], strict=True) for n in c.members}
    return np.array([coarse.dual.prices[0], *(of[c.members[0]] for c in classes)])


def _bound_with(
    evaluator: Evaluator, classes: list[WorkerClass], effort: Effort, deadline: float, start: Floats | None
) -> Dual:
    problem, costs, top_k = evaluator.problem, evaluator.costs, evaluator.problem.top_k
    workers = [n for c in classes for n in c.members]
    outcomes = Outcomes(costs, workers, top_k)
    tails = [[n for c in classes[i:] for n in c.members] for i in range(1, len(classes))]
    deep = [outcomes.deep(costs, tail) for tail in [*tails, []]]
    cut = [split(level, top_k, float(outcomes.home[top_k])) for level in levels(costs, classes, top_k)]
    own = own_levels(costs, classes, top_k) if effort.own else None
    floor_s = float(outcomes.least.min())
    groups = []
    for (_, size), layers in layer_kinds(evaluator).items():
        table = None
        if effort.possible and time.monotonic() < deadline:
            table = LayerBound(
                evaluator.weights[layers[0]],
                cut,
                outcomes,
                deep,
                top_k,
                effort.buckets if workers else [(0, 0)],
                [len(c.members) for c in classes],
                problem.sync_s,
                costs.ssd_s,
                own=own,
                limited=effort.limited,
                intervals=effort.intervals,
            )
        groups.append(Group(table, len(layers), size, floor_s))
    capacity = [float(usable_bytes(problem, 0)), *(float(c.capacity_bytes) for c in classes)]
    return solve_dual(groups, capacity, deadline, start)
