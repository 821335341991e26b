"""The entry of the solver: checks the problem, picks the method. Knows no method's insides."""

from __future__ import annotations

from titan.common.errors import PlanError
from titan.placement.plan import Plan
from titan.placement.problem import Problem
from titan.placement.solver.proportional import proportional

METHODS = ("proportional",)


def solve(problem: Problem, *, method: str = "proportional", time_limit_s: float = 30.0, seed: int = 0) -> Plan:
    """A valid plan for `problem`, deterministic for a seed.

    Args:
        method: "proportional" needs memory figures only.
        time_limit_s: the search stops here with the best plan so far.

    Raises:
        PlanViolation: a figure of the problem is out of bounds.
        MemoryBudgetError: node 0 cannot hold top-k slots in every layer.
        PlanError: unknown method.
    """
    del time_limit_s, seed
    problem.check()
    if method not in METHODS:
        raise PlanError(f"there is no placement method {method!r}", f"use one of {', '.join(METHODS)}")
    return proportional(problem)
