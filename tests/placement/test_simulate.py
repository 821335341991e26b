"""Slot tables, prefetching and whole plans under traces. Run: pytest tests/placement/test_simulate.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan.common.errors import PlanError
from titan.placement import Node, Problem, solve
from titan.placement.evaluate import Evaluator
from titan.placement.prefetching import Predictor, PrefetchRun, oracle, previous_row, run_prefetch, transition
from titan.placement.replay import replay_plan
from titan.placement.simulate import POLICIES, Table, run_table
from titan.placement.synthetic import synthetic_trace
from titan.placement.trace import Trace, TraceHeader

TOP_K, EXPERTS = 3, 9
STEPS = st.lists(
    st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True), min_size=1, max_size=40
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STEPS)
def test_proposition_with_as_many_slots_as_a_step_needs(steps: list[list[int]]) -> None:
    run = run_table(steps, TOP_K)
    for t, misses in enumerate(run.misses):
        before = set(steps[t - 1]) if t else set()
        assert misses == len(set(steps[t]) - before)
        assert TOP_K - len(set(steps[t]) & before) <= misses <= TOP_K


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STEPS, st.integers(1, 6))
def test_proposition_with_room_for_a_window(steps: list[list[int]], window: int) -> None:
    largest = max(len(set().union(*steps[max(0, t - window) : t])) for t in range(1, len(steps) + 1))
    capacity = max(TOP_K, largest)
    table = Table(capacity, "lru")
    for t, chosen in enumerate(steps):
        recent = set().union(*steps[max(0, t - window) : t])
        missing = set(table.step(chosen))
        assert not missing & recent  # what the window holds never misses
        if len(set().union(*steps[:t])) > capacity and len(recent) == capacity:
            assert missing == set(chosen) - recent  # and nothing else is there


@settings(max_examples=150, deadline=None, derandomize=True)
@given(STEPS, st.integers(TOP_K, EXPERTS))
def test_belady_never_misses_more(steps: list[list[int]], capacity: int) -> None:
    totals = {policy: sum(run_table(steps, capacity, policy).misses) for policy in POLICIES}
    assert totals["belady"] <= min(totals.values())
    assert totals["belady"] >= len({e for chosen in steps for e in chosen})  # each has to be loaded once


def test_lfu_keeps_the_frequent_expert() -> None:
    steps = [[0], [0], [0], [1], [2], [0]]
    assert run_table(steps, 2, "lfu").misses[-1] == 0
    assert run_table(steps, 2, "lru").misses[-1] == 1


def test_pinned_experts_never_miss_and_take_no_slot() -> None:
    run = run_table([[0, 1], [2, 1], [0, 1]], 1, pinned=[1])
    assert run.misses == (1, 1, 1)
    assert run.accesses == 3
    assert run.hit_rate == 0
    assert run_table([[1]], 1, pinned=[1]).hit_rate == 1


def test_more_slots_than_evictions_and_bad_arguments() -> None:
    assert run_table([[0, 1], [0, 1], [2, 0]], 3).evictions == 0
    with pytest.raises(PlanError, match="slots"):
        run_table([[0, 1]], 1)
    with pytest.raises(PlanError, match="lru, lfu, belady"):
        run_table([[0]], 1, "fifo")


HEADER = TraceHeader("f" * 64, tuple(range(6)), 16, 4)


def test_prefetch_oracle_removes_the_stall_from_the_depth_of_the_condition() -> None:
    trace = synthetic_trace(HEADER, 60, seed=1)

    def stall(depth: int) -> float:
        return run_prefetch(trace, 6, oracle(trace), depth=depth, fetch_s=0.43e-3, readers=4, layer_s=0.128e-3).stall_s

    stalls = [stall(d) for d in range(5)]
    assert stalls[0] > stalls[1] > stalls[2] > stalls[3] > 0
    assert stalls[4] == 0


def test_transition_predictor_beats_the_previous_row_where_layers_are_linked() -> None:
    rng = np.random.default_rng(0)
    ids = np.empty((300, 6, 4), dtype=np.uint16)
    link = rng.permutation(16)
    for row in range(300):
        ids[row, 0] = rng.choice(16, 4, replace=False)
        for layer in range(1, 6):
            ids[row, layer] = link[ids[row, layer - 1]]
    trace = Trace(HEADER, ids, np.arange(300))

    def run(predictor: Predictor) -> PrefetchRun:
        return run_prefetch(trace, 4, predictor, depth=1, fetch_s=1e-3, readers=2, layer_s=1e-4)

    linked, before = run(transition(trace, 1, 4)), run(previous_row(trace))
    assert linked.recall > 0.7
    assert before.recall == 0  # what the previous row used is resident: it cannot miss
    assert linked.stall_s < before.stall_s


def cluster_problem() -> Problem:
    nodes = (
        Node("home", 6 * 16 // 2, 20e-6, ssd_s=1e-3, readers=2),
        Node("w0", 30, 20e-6, round_trip_s=3e-4),
        Node("w1", 14, 30e-6, round_trip_s=4e-4),
    )
    return Problem("f" * 64, tuple(range(6)), (1,) * 6, 16, 4, (1e-4,) * 6, nodes, sync_s=2e-5)


def test_replay_agrees_with_the_prediction_on_independent_rows() -> None:
    problem = cluster_problem()
    plan = solve(problem)
    run = replay_plan(plan, problem, synthetic_trace(HEADER, 1_500, seed=9))
    assert plan.predicted is not None
    assert run.step_s == pytest.approx(plan.predicted.step_s, rel=0.03)
    assert run.local + run.remote + run.ssd == 1_500 * 6 * 4
    assert run.local > run.remote > 0
    assert run.steps == 1_500
    greedy = replay_plan(plan, problem, synthetic_trace(HEADER, 1_500, seed=9), evict_s=0.0)
    assert greedy.step_s > 1.01 * run.step_s  # reading what a worker holds evicts what is needed later


def test_replay_of_steps_with_several_rows_counts_every_pair() -> None:
    problem = cluster_problem()
    plan = solve(problem)
    trace = synthetic_trace(HEADER, 400, seed=9)
    batched = Trace(HEADER, trace.ids, np.arange(400) // 4)
    run = replay_plan(plan, problem, batched)
    assert run.steps == 100
    assert run.local + run.remote + run.ssd == 400 * 6 * 4
    single = replay_plan(plan, problem, trace)
    assert single.step_s < run.step_s < 4 * single.step_s


def test_replay_with_reuse_stalls_less() -> None:
    problem = cluster_problem()
    tight = solve(replace(problem, nodes=problem.nodes[:1]))
    flat = replay_plan(tight, problem, synthetic_trace(HEADER, 300, seed=3))
    reused = replay_plan(tight, problem, synthetic_trace(HEADER, 300, reuse=0.7, seed=3))
    assert reused.stall_s < flat.stall_s
    assert reused.cache_hit_rate > flat.cache_hit_rate


def test_a_trace_of_another_model_is_refused() -> None:
    problem = cluster_problem()
    other = TraceHeader("e" * 64, tuple(range(6)), 16, 4)
    with pytest.raises(PlanError, match="another model"):
        replay_plan(solve(problem, method="proportional"), problem, synthetic_trace(other, 3))


def test_frequencies_of_a_trace_are_a_problem_s() -> None:
    trace = synthetic_trace(HEADER, 2_000, zipf=0.8, seed=1)
    rows = tuple(tuple(row) for row in trace.frequencies().tolist())
    problem = cluster_problem()
    skewed = replace(problem, frequencies=rows)
    plan = solve(skewed)
    run = replay_plan(plan, skewed, trace)
    assert plan.predicted is not None
    assert run.step_s == pytest.approx(plan.predicted.step_s, rel=0.06)
    assert plan.predicted.step_s < Evaluator(problem).step(np.zeros((6, 16), dtype=np.int64)) * 5
