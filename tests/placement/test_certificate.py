"""What the certificate claims, against optima and replays. Run: pytest tests/placement/test_certificate.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fixtures.placement_cases import FAR, optimum_with_replicas, uneven_case

from titan.placement import Node, Plan, Problem, solve
from titan.placement.bench_cases import small_case
from titan.placement.evaluate import Evaluator
from titan.placement.predict import batch_step
from titan.placement.replay import replay_plan
from titan.placement.routing import sample, zipf_layers
from titan.placement.solver.bound import lower_bound
from titan.placement.solver.exact import by_counts, by_routing
from titan.placement.trace import Trace, TraceHeader


@pytest.mark.parametrize("seed", range(50))
def test_no_placement_with_replicas_beats_the_bound(seed: int) -> None:
    problem = uneven_case(seed, experts=4 + seed % 2)
    best = optimum_with_replicas(problem)
    value = lower_bound(Evaluator(problem), FAR).bound_s
    assert value <= best * (1 + 1e-6)
    assert value >= 0.5 * best


@pytest.mark.parametrize("seed", range(100, 130))
def test_no_placement_of_counts_beats_the_bound(seed: int) -> None:
    problem = uneven_case(seed, experts=9, layers=3)
    value, best = lower_bound(Evaluator(problem), FAR).bound_s, by_counts(Evaluator(problem))
    assert value <= best * (1 + 1e-6)


@pytest.mark.parametrize("seed", [20, 21, 23, 24, 25])
def test_no_placement_of_skewed_experts_beats_the_bound(seed: int) -> None:
    problem = small_case(seed, flat=False)
    best, proven = by_routing(Evaluator(problem), 20.0)
    assert proven
    assert lower_bound(Evaluator(problem), FAR).bound_s <= best * (1 + 1e-4)


def test_a_bound_out_of_time_is_still_a_bound() -> None:
    problem = uneven_case(3, experts=9, layers=3)
    hurried = lower_bound(Evaluator(problem), 0.0).bound_s
    assert 0 < hurried <= lower_bound(Evaluator(problem), FAR).bound_s


def wide_problem(top_k: int, **more) -> Problem:
    layers, experts = 6, 64
    size = layers * experts
    nodes = (
        Node("home", int(size * 0.5), 20e-6, ssd_s=2e-3, readers=4),
        Node("w", int(size * 0.6), 20e-6, round_trip_s=5e-4),
    )
    return Problem(
        "f" * 64, tuple(range(layers)), (1,) * layers, experts, top_k, (1e-4,) * layers, nodes, sync_s=2e-5, **more
    )


@pytest.mark.parametrize("top_k", [17, 24])
def test_many_experts_a_row_are_bounded_by_more_than_attention(top_k: int) -> None:
    plan = solve(wide_problem(top_k, batch_rows=(1,)))
    assert plan.gap is not None
    assert plan.gap < 0.1


def trace_of(problem: Problem, ids: np.ndarray) -> Trace:
    header = TraceHeader(problem.fingerprint, problem.layers, problem.num_experts, problem.top_k)
    return Trace(header, ids.astype(np.uint16), np.arange(len(ids)))


def independent(problem: Problem, rows: int, *, repeat: float = 0.0) -> np.ndarray:
    """Rows of the routing model [rows, layers, K]; with chance `repeat` a row is the one before again."""
    rng, weights = np.random.default_rng(5), Evaluator(problem).weights
    ids = np.stack([sample(w, problem.top_k, rows, rng) for w in weights], axis=1)
    for t in range(1, rows):
        if rng.random() < repeat:
            ids[t] = ids[t - 1]
    return ids


def tight_plan() -> tuple[Problem, Plan]:
    problem = wide_problem(6, frequencies=zipf_layers(6, 64, 6, 0.5))
    home, worker = problem.nodes
    nodes = (replace(home, memory_bytes=120), replace(worker, memory_bytes=100, round_trip_s=1e-3))
    problem = replace(problem, nodes=nodes)
    return problem, solve(problem)


def test_replays_of_independent_rows_stay_above_the_bound() -> None:
    problem, plan = tight_plan()
    run = replay_plan(plan, problem, trace_of(problem, independent(problem, 400)))
    assert plan.lower_bound_s is not None
    assert run.step_s >= plan.lower_bound_s


def test_rows_that_repeat_can_be_quicker_than_the_bound() -> None:
    """What the bound does not claim: it holds for rows that do not depend on the rows before."""
    problem, plan = tight_plan()
    run = replay_plan(plan, problem, trace_of(problem, independent(problem, 400, repeat=0.9)))
    assert plan.lower_bound_s is not None
    assert run.step_s < plan.lower_bound_s
    assert any("independent" in a for a in plan.advice)


@pytest.mark.parametrize("rows", [2, 8])
def test_a_step_of_several_rows_is_no_quicker_than_the_bound_of_one(rows: int) -> None:
    problem = wide_problem(4, frequencies=zipf_layers(6, 64, 4, 0.4))
    evaluator = Evaluator(problem)
    bound_s = lower_bound(evaluator, FAR).bound_s
    rng = np.random.default_rng(0)
    for _ in range(5):
        place = rng.integers(-1, 2, (6, 64))
        assert batch_step(evaluator, place, rows, steps=256) >= bound_s * 0.99
