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
from titan.placement.solver.shares import MAX_KINDS, MAX_NODES, MAX_TOP_K, Shares

Floats = NDArray[np.float64]
CLASSES = (3, 5)
FEW_NODES = 6  # with more and skewed routing, shares take longest and come last
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

    Workers are divided into few classes first; unlike ones are then looked at by themselves, then in more classes:
    the largest bound counts. Stops at `deadline` (time.monotonic()) with what is proven by then.
    """
    effort = Effort.of(evaluator)
    late = not all(evaluator.flat) and len(evaluator.problem.nodes) > FEW_NODES
    best: Bound | None = None
    for limit in CLASSES:
        classes = worker_classes(evaluator.problem, evaluator.costs, limit)
        if best is not None and (time.monotonic() > deadline or len(classes) == len(best.classes)):
            break
        start = None if best is None else _inherited(best, classes)
        dual = _bound_with(evaluator, classes, effort, deadline, start)
        if best is None:
            best = Bound(dual.bound_s, classes, dual)
            if not late:
                alone = _by_shares(evaluator, best.bound_s, (time.monotonic() + 2 * deadline) / 3)
                best = replace(best, bound_s=max(alone or 0.0, best.bound_s))
        elif dual.bound_s > best.bound_s:
            best = replace(best, bound_s=dual.bound_s)
    assert best is not None
    if late:
        best = replace(best, bound_s=max(_by_shares(evaluator, best.bound_s, deadline) or 0.0, best.bound_s))
    return replace(best, bound_s=evaluator.fixed_s + best.bound_s * (1 - 1e-9))


def _by_shares(evaluator: Evaluator, above_s: float, deadline: float) -> float | None:
    """`Shares.bound` where it can be tighter than the tables and is not too much work."""
    kinds = [(layers[0], len(layers), size) for (_, size), layers in layer_kinds(evaluator).items()]
    unlike = len(worker_classes(evaluator.problem, evaluator.costs, 2)) > 1
    if not unlike or len(kinds) > MAX_KINDS or evaluator.top_k > MAX_TOP_K or len(evaluator.problem.nodes) > MAX_NODES:
        return None
    return Shares(evaluator, kinds).bound(above_s, deadline) if time.monotonic() < deadline else None


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
    possible = effort.possible and time.monotonic() < deadline
    cut = [split(x, top_k, float(outcomes.home[top_k])) for x in levels(costs, classes, top_k)] if possible else []
    own = own_levels(costs, classes, top_k) if effort.own and possible else None
    floor_s = float(outcomes.least.min())
    groups = []
    for (_, size), layers in layer_kinds(evaluator).items():
        table = None
        if possible and time.monotonic() < deadline:
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
