"""What wire precision `reduced` is worth in a plan. Run: .venv/bin/pytest tests/placement/test_precision.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from titan.placement.cost import Costs, layer_latency
from titan.placement.evaluate import Evaluator
from titan.placement.predict import batch_layer
from titan.placement.problem import Problem
from titan.placement.routing import zipf_layers
from titan.placement.solver.advice import about_precision
from titan.placement.values import Node

NODES = (
    Node("home", 1 << 40, compute_s=50e-6, ssd_s=1e-3, readers=2),
    Node("near", 1 << 40, compute_s=40e-6, round_trip_s=200e-6, bandwidth_bytes_s=1e8),
    Node("far", 1 << 40, compute_s=40e-6, round_trip_s=400e-6, bandwidth_bytes_s=2e7),
)
PROBLEM = Problem(
    fingerprint="f" * 64,
    layers=(0, 1, 2),
    expert_bytes=(1 << 20,) * 3,
    num_experts=16,
    top_k=4,
    attention_s=(1e-4,) * 3,
    nodes=NODES,
    activation_bytes=4096,
    frequencies=zipf_layers(3, 16, 4, 0.7, seed=3),
)
PLACE = np.array([[0] * 16, [0, 1, 2, 1] * 4, [2, 2, 0, 1] * 4])


def test_one_result_a_row_comes_back() -> None:
    exact, reduced = (Costs.of(NODES, 4096, reduced=flag) for flag in (False, True))
    wire = 4096 / 1e8
    for pairs in (1, 4):
        counts = [0, pairs, 0]
        there = layer_latency(counts, exact.pair_s, exact.base_s, 0.0, 0.0)
        assert there == pytest.approx(200e-6 + pairs * 40e-6 + (1 + pairs) * wire)
        there = layer_latency(counts, reduced.pair_s, reduced.base_s, 0.0, 0.0)
        assert there == pytest.approx(200e-6 + pairs * 40e-6 + 2 * wire)


def test_expected_results_are_those_of_sampled_rows() -> None:
    evaluator = Evaluator(PROBLEM)
    pairs, rows = evaluator.results(PLACE)
    sampled_pairs = sampled_rows = 0.0
    for layer, row in enumerate(PLACE):
        at = row[evaluator.routing(layer, 4000, 1, 0)[:, 0]]
        sampled_pairs += (at > 0).sum() / 4000
        sampled_rows += sum((at == worker).any(axis=1).mean() for worker in (1, 2))
    assert pairs == pytest.approx(sampled_pairs, rel=0.02)
    assert rows == pytest.approx(sampled_rows, rel=0.02)
    assert rows < pairs


def test_batches_are_charged_alike() -> None:
    exact, reduced = Evaluator(PROBLEM), Evaluator(replace(PROBLEM, reduced=True))
    ids = exact.routing(1, 50, 8, 0)
    everywhere = np.full(16, 2)
    wire = 4096 / 2e7
    difference = batch_layer(exact, everywhere, ids) - batch_layer(reduced, everywhere, ids)
    np.testing.assert_allclose(difference, (8 * 4 - 8) * wire)


def test_the_plan_says_what_it_would_gain() -> None:
    evaluator = Evaluator(PROBLEM)
    (sentence,) = about_precision(evaluator, PLACE)
    pairs, rows = evaluator.results(PLACE)
    assert f"{rows * 4:.1f} KiB a token instead of {pairs * 4:.1f} KiB" in sentence
    assert about_precision(evaluator, np.zeros_like(PLACE)) == ()
    assert about_precision(Evaluator(replace(PROBLEM, reduced=True)), PLACE) == ()
