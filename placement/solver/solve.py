"""The entry of the solver: checks the problem, searches, certifies, compares, explains. Knows no method's insides."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from titan.common.errors import PlanError
from titan.placement.arrangement import from_plan, to_plan
from titan.placement.evaluate import Evaluator, Ints
from titan.placement.plan import Plan
from titan.placement.predict import predict
from titan.placement.problem import Problem
from titan.placement.solver.baselines import NAMES, baseline
from titan.placement.solver.bound import lower_bound
from titan.placement.solver.classes import worker_classes
from titan.placement.solver.patterns import construct
from titan.placement.solver.polish import polish
from titan.placement.solver.proportional import proportional, require_home

METHODS = ("search", "proportional")


def solve(problem: Problem, *, method: str = "search", time_limit_s: float = 30.0, seed: int = 0) -> Plan:
    """A valid plan for `problem`, deterministic for a seed.

    Args:
        method: "search" minimises the expected step (5) and certifies the gap; "proportional" needs memory alone.
        time_limit_s: the search stops here with the best plan so far.

    Raises:
        PlanViolation: a figure of the problem is out of bounds.
        MemoryBudgetError: node 0 cannot hold top-k slots in every layer.
        PlanError: unknown method.
    """
    started = time.monotonic()
    problem.check()
    if method not in METHODS:
        raise PlanError(f"there is no placement method {method!r}", f"use one of {', '.join(METHODS)}")
    require_home(problem)
    if method == "proportional":
        return proportional(problem)
    evaluator = Evaluator(problem)
    classes = worker_classes(problem, evaluator.costs)
    bound_s, dual = lower_bound(evaluator, classes, started + 0.4 * time_limit_s)
    naive = {name: baseline(name, problem, evaluator.weights) for name in NAMES}
    naive["proportional"] = from_plan(proportional(problem), evaluator.weights)
    used = [c for c, n in zip(dual.columns, dual.usage, strict=False) if n > 1e-9]
    candidates = [construct(evaluator, classes, used, started + 0.6 * time_limit_s), *naive.values()]
    place = best_of(evaluator, candidates)
    tries = 400 + 40 * len(problem.nodes) * min(len(problem.layers), 16)
    place = polish(evaluator, place, seed=seed, deadline=started + 0.8 * time_limit_s, tries=tries)
    plan = to_plan(problem, place, evaluator.weights)
    predicted = predict(evaluator, place, seed=seed)
    return replace(
        plan,
        predicted=predicted,
        baselines={name: predict(evaluator, row, seed=seed, steps=64) for name, row in naive.items()},
        lower_bound_s=bound_s,
        gap=max(0.0, predicted.step_s / bound_s - 1),
    )


def best_of(evaluator: Evaluator, candidates: list[Ints]) -> Ints:
    """The arrangement with the smallest expected step, the first of equals."""
    return candidates[int(np.argmin([evaluator.step(c) for c in candidates]))]
