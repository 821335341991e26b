"""Reuse from row to row, and what LRU slots then miss, against replays. Run: pytest tests/placement/test_reuse.py"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from titan.common.errors import PlanViolation
from titan.common.registry import open_checkpoint
from titan.coordinator.learned import LearnedRouting
from titan.coordinator.moe.routing_counts import KEPT_ROWS, RoutingCounts
from titan.deploy import DEMO_MODEL
from titan.placement import Node, Problem, solve
from titan.placement.evaluate import MISS, Evaluator
from titan.placement.replay import replay_plan
from titan.placement.reuse import LAGS, ReuseCounts, chance_fresh, expected_misses, over_layers, reuse_of
from titan.placement.routing import sample, weights_from_frequencies, zipf_frequencies
from titan.placement.simulate import run_table
from titan.placement.study import Study
from titan.placement.synthetic import synthetic_trace
from titan.placement.trace import Trace, TraceHeader

EXPERTS, TOP_K = 32, 4
HEADER = TraceHeader("f" * 64, (0, 1, 2, 3), EXPERTS, TOP_K)
FLAT = np.full(EXPERTS, TOP_K / EXPERTS)


def test_shares_are_counted_as_by_hand() -> None:
    rng = np.random.default_rng(0)
    rows = np.stack([rng.choice(EXPERTS, TOP_K, replace=False) for _ in range(700)])
    counts = ReuseCounts(EXPERTS, TOP_K)
    for part in (rows[:1], rows[1:300], rows[300:]):  # however they come
        counts.add(part)
    fresh = counts.fresh()
    assert fresh is not None
    for share, lag in zip(fresh, LAGS, strict=True):
        if lag <= 512:
            new = [len(set(rows[t]) - set(rows[t - lag : t].ravel())) for t in range(lag, 700)]
            assert share == pytest.approx(sum(new) / (TOP_K * len(new)))


def test_independent_rows_have_the_shares_of_chance() -> None:
    trace = synthetic_trace(HEADER, 3_000, seed=1)
    reuse = reuse_of(trace)
    assert reuse is not None
    by_chance = chance_fresh(FLAT, np.array(LAGS))
    assert np.mean(reuse, axis=0)[:6] == pytest.approx(by_chance[:6], rel=0.05, abs=0.01)


@pytest.mark.parametrize("zipf", [0.0, 0.8])
@pytest.mark.parametrize("reuse", [0.0, 0.3, 0.7])
def test_expected_misses_are_those_of_a_replay(zipf: float, reuse: float) -> None:
    trace = synthetic_trace(HEADER, 3_000, zipf=zipf, reuse=reuse, seed=2)
    measured, frequencies = reuse_of(trace), trace.frequencies()
    assert measured is not None
    for pinned, slots in ((0, 4), (0, 8), (0, 16), (8, 6), (16, 8)):
        loose = np.arange(pinned, EXPERTS)
        for layer in range(2):
            run = run_table(trace.ids[:, layer].tolist(), slots, "lru", range(pinned))
            replayed = sum(run.misses) / len(trace.ids)
            p = frequencies[layer]
            assert expected_misses(p[loose], slots, p, measured[layer]) == pytest.approx(replayed, rel=0.1, abs=0.09)
            if reuse == 0.7:
                assert expected_misses(p[loose], slots, p, None) > 1.25 * replayed, "reuse made no difference"


def test_a_step_of_several_sequences_misses_more_but_no_more_than_it_selects() -> None:
    frequencies = zipf_frequencies(EXPERTS, TOP_K, 0.5)
    fresh = tuple(0.5 * chance_fresh(frequencies, np.array(LAGS)))
    one, four = (expected_misses(frequencies, 8, frequencies, fresh, rows) for rows in (1, 4))
    assert one < four < np.sum(1 - (1 - frequencies) ** 4)
    weights, rng = weights_from_frequencies(frequencies, TOP_K), np.random.default_rng(0)
    ids = sample(weights, TOP_K, 4_000, rng).reshape(2_000, 2, TOP_K)
    steps = [sorted(set(rows.ravel().tolist())) for rows in ids]
    replayed = sum(run_table(steps, 12).misses) / len(steps)
    assert expected_misses(frequencies, 12, frequencies, None, 2) == pytest.approx(replayed, rel=0.05)
    assert expected_misses(frequencies, EXPERTS, frequencies, fresh) == 0


def test_a_study_says_what_the_rows_say() -> None:
    trace = synthetic_trace(HEADER, 600, zipf=0.8, reuse=0.6, seed=6)
    study = Study.of(trace, capacities=(4,), depths=(1,), fetch_s=1e-3, layer_s=1e-4, readers=1)
    assert study.reuse == pytest.approx(trace.reuse().mean())
    assert study.reuse > 0.55 > study.reuse_by_chance > TOP_K / EXPERTS
    pairs = [np.triu(trace.coactivation(layer), 1).max() for layer in range(4)]
    assert study.together == pytest.approx(np.mean(pairs))
    assert 0 < study.together_by_chance < 1
    assert 4 < study.working_set["4"] < study.working_set["16"] < study.working_set["64"] <= EXPERTS


def tight(**more: object) -> Problem:
    nodes = (Node("home", 4 * 14, 20e-6, ssd_s=1e-3),)
    return Problem("f" * 64, (0, 1, 2, 3), (1,) * 4, EXPERTS, TOP_K, (1e-4,) * 4, nodes, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("reuse", [0.2, 0.7])
def test_a_plan_s_step_is_that_of_its_replay_with_reuse(reuse: float) -> None:
    trace = synthetic_trace(HEADER, 2_000, zipf=0.5, reuse=reuse, seed=3)
    frequencies = tuple(tuple(row) for row in trace.frequencies().tolist())
    known = tight(frequencies=frequencies, reuse=reuse_of(trace))
    plan = solve(known, time_limit_s=2)
    run = replay_plan(plan, known, trace)
    assert plan.predicted is not None
    assert plan.predicted.step_s == pytest.approx(run.step_s, rel=0.12)
    anew = solve(replace(known, reuse=None), time_limit_s=2)
    assert anew.predicted is not None
    if reuse == 0.7:
        assert anew.predicted.step_s > 1.15 * run.step_s, "the missing term is not missing"


def test_the_gap_is_about_rows_that_are_drawn_anew() -> None:
    trace = synthetic_trace(HEADER, 1_000, reuse=0.7, seed=4)
    problem = tight(reuse=reuse_of(trace))
    plan = solve(problem, time_limit_s=2)
    assert plan.predicted is not None
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s == pytest.approx(solve(tight(), time_limit_s=2).lower_bound_s)
    assert plan.predicted.step_s < plan.lower_bound_s, "a step with reuse may be shorter than the bound"
    assert plan.gap is not None
    assert 0 <= plan.gap < 0.05
    assert any("the lower bound and the gap are about such rows" in sentence for sentence in plan.advice)


def test_misses_of_an_arrangement_and_no_reuse_change_nothing() -> None:
    row = np.array([0] * 14 + [MISS] * 18)
    place = np.stack([row] * 4)
    plain, same = Evaluator(tight()), Evaluator(tight(reuse=(tuple(chance_fresh(FLAT, np.array(LAGS))),) * 4))
    assert plain.misses(place) == pytest.approx(4 * 18 * TOP_K / EXPERTS)
    assert same.misses(place) == pytest.approx(plain.misses(place), rel=0.02)
    assert same.step(place) == pytest.approx(plain.step(place), rel=0.02)


@pytest.mark.parametrize("bad", [((0.5,) * 3,) * 4, ((0.2, 0.3, *[0.1] * 9),) * 4, ((1.5, *[0.1] * 10),) * 4])
def test_impossible_reuse_is_refused(bad: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(PlanViolation, match="reuse"):
        tight(reuse=bad).check()


def test_too_few_rows_say_nothing_and_unknown_layers_get_the_mean() -> None:
    assert reuse_of(synthetic_trace(HEADER, 100)) is None
    together = synthetic_trace(HEADER, 1_000)
    assert reuse_of(Trace(HEADER, together.ids, np.arange(1_000) // 2)) is None, "rows of one step follow no other"
    filled = over_layers([None, (0.4,) * 11, (0.2,) * 11])
    assert filled is not None
    assert filled[0] == pytest.approx((0.3,) * 11)


def test_serving_counts_what_a_trace_would_say(tmp_path: Path) -> None:
    trace = synthetic_trace(HEADER, 2 * KEPT_ROWS, reuse=0.5, seed=5)
    counts = RoutingCounts([0, 1, 2, 3], EXPERTS, TOP_K)
    counts.saw(0, np.arange(8).reshape(2, TOP_K))
    assert counts.reuse() is None
    for row in trace.ids:
        for layer in range(4):
            counts.saw(layer, row[layer][None])
    reuse = counts.reuse()
    assert reuse == reuse_of(trace)
    assert reuse is not None
    shape = replace(open_checkpoint(DEMO_MODEL).shape, layers=open_checkpoint(DEMO_MODEL).shape.layers[:4])
    assert LearnedRouting(tmp_path, shape).reuse() is None
    LearnedRouting(tmp_path, shape).remember([], None, reuse)
    assert LearnedRouting(tmp_path, shape).reuse() == reuse
    (file,) = tmp_path.glob("reuse-*")
    file.write_bytes(file.read_bytes()[:-40])
    assert LearnedRouting(tmp_path, shape).reuse() is None
