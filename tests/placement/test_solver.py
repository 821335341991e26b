"""The search: structure, optimality on small problems, bounds, bad input. Run: pytest tests/placement/test_solver.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from titan.common.errors import MemoryBudgetError, PlanViolation
from titan.placement import Node, Plan, Problem, solve
from titan.placement.arrangement import from_plan
from titan.placement.bench_cases import small_case
from titan.placement.evaluate import Evaluator
from titan.placement.predict import batch_layer, predict
from titan.placement.routing import sample
from titan.placement.solver.exact import by_counts, by_routing


def problem_of(
    home: float, *workers: tuple[float, float], layers: int = 12, experts: int = 32, zipf=None, **more
) -> Problem:
    """Memory as a share of the model; workers as (share, round trip in seconds)."""
    size = layers * experts
    nodes = (
        Node("home", int(size * home), 20e-6, ssd_s=2e-3, readers=4),
        *(Node(f"w{i}", int(size * m), 20e-6, round_trip_s=rt) for i, (m, rt) in enumerate(workers)),
    )
    return Problem(
        fingerprint="f" * 64,
        layers=tuple(range(layers)),
        expert_bytes=(1,) * layers,
        num_experts=experts,
        top_k=4,
        attention_s=(1e-4,) * layers,
        nodes=nodes,
        sync_s=2e-5,
        frequencies=zipf,
        **more,
    )


def checked(problem: Problem, **kwargs) -> Plan:
    plan = solve(problem, **kwargs)
    plan.validate()
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.predicted is not None
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= plan.predicted.step_s * (1 + 1e-9)
    for name, other in plan.baselines.items():
        assert plan.predicted.step_s <= other.step_s * (1 + 1e-9), name
    return plan


def test_whole_layers_stay_home_and_few_pay_the_round_trip() -> None:
    plan = checked(problem_of(0.6, (0.5, 5e-4)))
    whole = sum(plan.is_whole(i) for i in range(12))
    assert whole >= 6
    assert plan.gap is not None
    assert plan.gap < 0.05
    assert plan.baselines["hash"].step_s > 1.2 * plan.predicted.step_s  # type: ignore[union-attr]


def test_everything_at_home_when_it_fits() -> None:
    plan = checked(problem_of(1.0, (1.0, 5e-4)))
    assert all(plan.is_whole(i) for i in range(12))
    assert plan.gap == pytest.approx(0, abs=1e-6)
    assert any("w0 holds nothing" in a for a in plan.advice)
    assert any("home alone is the fastest" in a for a in plan.advice)


def test_a_link_slower_than_the_ssd_is_not_used() -> None:
    plan = checked(problem_of(0.5, (1.0, 50e-3)))
    assert not any(plan.held_by(1))
    assert any("does not earn its place" in a for a in plan.advice)


def test_the_near_worker_holds_more_than_the_far_one() -> None:
    plan = checked(problem_of(0.4, (0.4, 4e-4), (0.4, 4e-3)))
    near, far = (sum(map(len, plan.held_by(n))) for n in (1, 2))
    assert near > far
    far_layers = [i for i, row in enumerate(plan.held_by(2)) if row]
    assert len(far_layers) <= 6  # the far link is paid in as few layers as can be


def test_tight_memory_leaves_the_rest_to_the_ssd() -> None:
    plan = checked(problem_of(0.3, (0.3, 5e-4)))
    assert plan.predicted is not None
    assert plan.predicted.stall_s > 0
    assert any("in nobody's memory" in a for a in plan.advice)


def test_skewed_routing_keeps_frequent_experts_near() -> None:
    row = np.arange(1, 33) ** -1.0
    row = tuple((4 * row / row.sum()).clip(max=0.9))
    row = tuple(np.array(row) * 4 / sum(row))
    plan = checked(problem_of(0.3, (0.8, 5e-4), zipf=(row,) * 12))
    home = np.mean([np.mean([row[e] for e in held]) for held in plan.held_by(0) if held])
    away = np.mean([np.mean([row[e] for e in held]) for held in plan.held_by(1) if held])
    assert home > away


def test_spare_worker_memory_holds_replicas_that_save_time() -> None:
    plan = checked(problem_of(0.15, (0.9, 1e-4), (0.9, 1e-4), (0.9, 1e-4)))
    assert any(len(holders) > 1 for row in plan.residency for holders in row)
    assert plan.predicted is not None
    evaluator = Evaluator(problem_of(0.15, (0.9, 1e-4), (0.9, 1e-4), (0.9, 1e-4)))
    assert plan.predicted.step_s < evaluator.step(from_plan(plan, evaluator.weights))


def test_one_node_and_its_ssd() -> None:
    plan = checked(problem_of(0.5))
    assert plan.gap is not None
    assert plan.gap < 0.05


@pytest.mark.parametrize("seed", range(8))
def test_small_flat_problems_are_solved_to_the_optimum(seed: int) -> None:
    problem = small_case(seed, flat=True)
    plan, best = checked(problem), by_counts(Evaluator(problem))
    assert plan.predicted is not None
    assert plan.predicted.step_s <= best * 1.01
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= best * (1 + 1e-6)


@pytest.mark.parametrize("seed", [3, 11])
def test_small_skewed_problems_are_solved_to_the_optimum(seed: int) -> None:
    problem = small_case(seed, flat=False)
    plan, (best, proven) = checked(problem), by_routing(Evaluator(problem), 20)
    assert proven
    assert plan.predicted is not None
    assert plan.predicted.step_s <= best * 1.01
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= best * (1 + 1e-4)


def test_energy_and_traffic_move_work_to_the_frugal_node() -> None:
    problem = problem_of(0.4, (0.5, 5e-4), (0.5, 5e-4), activation_bytes=1000)
    hungry, frugal = (replace(problem.nodes[i], power_w=p, bandwidth_bytes_s=1e9) for i, p in ((1, 80.0), (2, 2.0)))
    nodes = (problem.nodes[0], hungry, frugal)
    plan = solve(replace(problem, nodes=nodes, energy_weight=0.05, traffic_weight=0.1))
    assert sum(map(len, plan.held_by(2))) > 1.5 * sum(map(len, plan.held_by(1)))
    assert plan.gap is not None
    assert plan.gap >= 0


def test_deterministic_for_a_seed() -> None:
    problem = problem_of(0.4, (0.3, 5e-4), (0.4, 7e-4))
    assert solve(problem, seed=3) == solve(problem, seed=3)


def test_out_of_time_still_gives_a_valid_plan() -> None:
    checked(problem_of(0.4, (0.3, 5e-4), (0.4, 7e-4)), time_limit_s=0.0)


def test_layers_of_different_sizes_fit() -> None:
    problem = problem_of(0.5, (0.4, 5e-4))
    sizes = tuple(1 + i % 3 for i in range(12))
    nodes = tuple(replace(n, memory_bytes=n.memory_bytes * 2) for n in problem.nodes)
    checked(replace(problem, expert_bytes=sizes, nodes=nodes))


def test_figures_of_zero_and_a_router_without_choice() -> None:
    problem = problem_of(0.5, (0.4, 0.0))
    nodes = tuple(replace(n, compute_s=0.0, ssd_s=0.0) for n in problem.nodes)
    idle = solve(replace(problem, nodes=nodes, attention_s=(0.0,) * 12, sync_s=0.0))
    assert idle.lower_bound_s == 0
    assert idle.gap is None
    fixed = (1.0,) * 4 + (0.0,) * 28
    plan = checked(replace(problem_of(0.5, (0.4, 5e-4)), frequencies=(fixed,) * 12))
    assert all(0 in plan.residency[i][e] or not plan.residency[i][e] for i in range(12) for e in range(4))


def test_home_without_top_k_slots_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match="48"):
        solve(problem_of(0.1, (0.9, 5e-4)))


def test_nan_in_a_figure_is_refused() -> None:
    problem = problem_of(0.5, (0.5, float("nan")))
    with pytest.raises(PlanViolation, match="round_trip_s of node w0"):
        solve(problem)


def test_prediction_agrees_with_sampled_routing() -> None:
    problem = problem_of(0.35, (0.3, 5e-4), (0.2, 6e-4), layers=3)
    evaluator = Evaluator(problem)
    place = from_plan(solve(problem), evaluator.weights)
    ids = sample(evaluator.weights[0], 4, 20_000, np.random.default_rng(1)).reshape(-1, 1, 4)
    sampled = sum(float(batch_layer(evaluator, row, ids).mean()) for row in place) + evaluator.fixed_s
    predicted = predict(evaluator, place)
    assert predicted.step_s == pytest.approx(sampled, rel=0.01)
    parts = predicted.attention_s + predicted.sync_s + predicted.compute_s + predicted.round_trip_s + predicted.stall_s
    assert parts == pytest.approx(predicted.step_s)
    rates = dict(predicted.tokens_per_s)
    assert rates[1] < rates[4] < rates[8]
