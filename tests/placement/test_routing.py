"""The routing model against listing every routing. Run: pytest tests/placement/test_routing.py"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from titan.placement import routing
from titan.placement.expected import expected_max

WEIGHTS = np.array([3.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.2])
TOP_K = 3


def every_routing() -> list[tuple[tuple[int, ...], float]]:
    chosen = list(itertools.combinations(range(len(WEIGHTS)), TOP_K))
    chance = np.array([math.prod(WEIGHTS[list(s)]) for s in chosen])
    return list(zip(chosen, chance / chance.sum(), strict=True))


def test_inclusion_and_back() -> None:
    frequencies = [sum(p for s, p in every_routing() if e in s) for e in range(len(WEIGHTS))]
    assert routing.inclusion(WEIGHTS, TOP_K) == pytest.approx(frequencies)
    fitted = routing.weights_from_frequencies(frequencies, TOP_K)
    assert fitted == pytest.approx(WEIGHTS / WEIGHTS.mean(), rel=1e-6)


def test_flat_frequencies_give_equal_weights() -> None:
    assert (routing.weights_from_frequencies([0.25] * 16, 4) == 1).all()


def test_frequencies_of_zero_and_one_are_met_closely() -> None:
    target = [1.0, 0.0, 0.5, 0.5]
    fitted = routing.weights_from_frequencies(target, 2)
    assert routing.inclusion(fitted, 2) == pytest.approx(target, abs=1e-3)


def test_samples_follow_the_model() -> None:
    rows = routing.sample(WEIGHTS, TOP_K, 20_000, np.random.default_rng(0))
    assert (np.diff(rows, axis=1) > 0).all()
    seen = np.bincount(rows.ravel(), minlength=len(WEIGHTS)) / len(rows)
    assert seen == pytest.approx(routing.inclusion(WEIGHTS, TOP_K), abs=0.015)


@pytest.mark.parametrize("base_s", [[0.0, 2.0, 5.0], [0.3, 0.0, 0.1], [0.0, 50.0, 1.0]])
def test_expected_max_equals_the_listed_mean(base_s: list[float]) -> None:
    groups, pair_s = [[0, 1], [2, 3, 4], [5, 6]], [1.0, 1.3, 0.8]
    exact = sum(
        p * max(base_s[n] + pair_s[n] * k for n in range(3) if (k := sum(e in groups[n] for e in s)))
        for s, p in every_routing()
    )
    polys = [routing.group_polynomial(WEIGHTS[g], TOP_K) for g in groups]
    assert expected_max(polys, pair_s, base_s, TOP_K) == pytest.approx(exact)


def test_zipf_frequencies_sum_to_top_k_and_fall() -> None:
    row = routing.zipf_frequencies(64, 8, 0.5)
    assert row.sum() == pytest.approx(8)
    assert (np.diff(row) < 0).all()
