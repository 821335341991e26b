"""The entry of the solver: checks the problem, searches, certifies, compares, explains. Knows no method's insides."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from titan.common.errors import PlanError
from titan.placement.arrangement import from_plan, to_plan
from titan.placement.evaluate import MISS, Evaluator, Ints
from titan.placement.plan import Plan
from titan.placement.predict import predict
from titan.placement.problem import Problem
from titan.placement.solver.advice import about_precision, about_reads, explain
from titan.placement.solver.baselines import NAMES, baseline
from titan.placement.solver.bound import lower_bound
from titan.placement.solver.classes import worker_classes
from titan.placement.solver.disks import least_reading_s, read_elsewhere, readers_of, relaxed
from titan.placement.solver.patterns import construct
from titan.placement.solver.polish import polish
from titan.placement.solver.proportional import proportional, require_home
from titan.placement.solver.replicate import replicate

METHODS = ("search", "proportional")
MAX_TRIED = 9  # nodes up to which leaving a worker out is tried
BASELINE_STEPS = 64  # sampled for a naive placement's rates
RESERVED = 0.05  # of the time limit: a stage that looks at the clock late
WORTH_READS = 0.01  # of a step: workers' disks that save less are left alone
WORTH_REPLICAS = 1e-3  # of a step: replicas that save less are not loaded


def solve(problem: Problem, *, method: str = "search", time_limit_s: float = 30.0, seed: int = 0) -> Plan:
    """A valid plan for `problem`, deterministic for a seed.

    Args:
        method: "search" minimises the expected step (5) and certifies the gap; "proportional" needs memory alone.
        time_limit_s: the search is over by then, with the best plan so far. Only what every plan needs (routing
            weights, naive placements, predictions) is done whatever the limit.

    Raises:
        PlanViolation: a figure of the problem is out of bounds.
        MemoryBudgetError: node 0 cannot hold top-k slots in every layer.
        PlanError: unknown method.
    """
    problem.check()
    if method not in METHODS:
        raise PlanError(f"there is no placement method {method!r}", f"use one of {', '.join(METHODS)}")
    require_home(problem)
    if method == "proportional":
        return proportional(problem)
    clock = _Clock(time_limit_s)
    evaluator = Evaluator(problem)
    drawn = evaluator  # rows as the bound takes them: independent of the rows before
    if problem.reuse is not None:
        drawn = Evaluator(replace(problem, reuse=None), like=evaluator)
    naive = {name: baseline(name, problem, evaluator.weights) for name in NAMES}
    naive["proportional"] = from_plan(proportional(problem), evaluator.weights)
    started = time.monotonic()
    baselines = {name: predict(evaluator, row, seed=seed, steps=BASELINE_STEPS) for name, row in naive.items()}
    clock.reserve(time.monotonic() - started)  # about what the plan's own prediction takes, with more steps
    bound = lower_bound(drawn, clock.at(0.5))
    candidates = [construct(drawn, bound.classes, bound.dual.used, clock.at(0.6)), *naive.values()]
    smaller = _without_one(drawn, clock.at(0.68))
    place = best_of(evaluator, [*candidates, *smaller.values()])
    tries = 1000 if place.size > 1024 else 4000
    place = polish(evaluator, place, seed=seed, deadline=clock.at(0.85), tries=tries)
    reading = place
    bound_s = bound.bound_s
    if readers_of(problem) and (place == MISS).any():  # then the bound has to cover workers' disks, used or not
        other = Evaluator(relaxed(drawn.problem), like=evaluator)
        least_s = lower_bound(other, clock.at(0.92)).bound_s
        bound_s = min(bound_s, max(least_s, evaluator.fixed_s + least_reading_s(evaluator)))
        reading = read_elsewhere(evaluator, place, clock.at(0.97))
        if evaluator.step(reading) > (1 - WORTH_READS) * evaluator.step(place):
            reading = place
        else:
            smaller = _reading_without_one(evaluator, smaller, clock.at(0.99))
    replicas, saved_s = {}, 0.0
    if reading is place:
        replicas, saved_s = replicate(evaluator, place, seed=seed, deadline=clock.at(1.0))
    without_s, place = evaluator.step(place), reading
    weighted = problem.energy_weight or problem.traffic_weight  # dispatch minimises time alone
    if weighted or saved_s < WORTH_REPLICAS * evaluator.step(place):
        replicas, saved_s = {}, 0.0
    plan = to_plan(problem, place, evaluator.weights, replicas)
    plan = replace(
        plan,
        predicted=predict(evaluator, place, seed=seed, saved_s=saved_s),
        baselines=baselines,
        lower_bound_s=max(0.0, bound_s),
        gap=max(0.0, (drawn.step(place) - saved_s) / bound_s - 1) if bound_s > 0 else None,
    )
    advice = explain(
        plan,
        {name: evaluator.step(row) for name, row in smaller.items()},
        drawn_anew_s=None if problem.reuse is None else drawn.step(place) - saved_s,
    )
    reads = about_reads(evaluator, plan, place, without_s)
    return replace(plan, advice=(*advice, *reads, *about_precision(evaluator, place)))


class _Clock:
    """Instants of a search by the share of its time that is over; the end keeps some back for what must be done."""

    def __init__(self, limit_s: float) -> None:
        self._start, self._limit_s = time.monotonic(), limit_s

    def reserve(self, seconds: float) -> None:
        self._limit_s = max(0.0, self._limit_s - seconds - RESERVED * self._limit_s)

    def at(self, share: float) -> float:
        return self._start + share * self._limit_s


def _without_one(whole: Evaluator, deadline: float) -> dict[str, Ints]:
    """Arrangements that leave one worker empty, by its name, as far as the time allows."""
    problem = whole.problem
    out: dict[str, Ints] = {}
    if len(problem.nodes) > MAX_TRIED:
        return out
    for index, node in enumerate(problem.nodes[1:], start=1):
        if time.monotonic() > deadline:
            break
        evaluator = _emptied(whole, index)
        classes = worker_classes(evaluator.problem, evaluator.costs)
        out[node.name] = construct(evaluator, classes, (), deadline, effort=1)
    return out


def _reading_without_one(whole: Evaluator, smaller: dict[str, Ints], deadline: float) -> dict[str, Ints]:
    """The arrangements of `_without_one` with the other workers reading as well, as far as the time allows."""
    out: dict[str, Ints] = {}
    for index, node in enumerate(whole.problem.nodes[1:], start=1):
        if node.name in smaller and time.monotonic() < deadline:
            out[node.name] = read_elsewhere(_emptied(whole, index), smaller[node.name], deadline)
    return out


def _emptied(whole: Evaluator, index: int) -> Evaluator:
    """With no memory on one worker."""
    nodes = whole.problem.nodes
    nodes = (*nodes[:index], replace(nodes[index], memory_bytes=0), *nodes[index + 1 :])
    return Evaluator(replace(whole.problem, nodes=nodes), like=whole)


def best_of(evaluator: Evaluator, candidates: list[Ints]) -> Ints:
    """The arrangement with the smallest expected step, the first of equals."""
    return candidates[int(np.argmin([evaluator.step(c) for c in candidates]))]
