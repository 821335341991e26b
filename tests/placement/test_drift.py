"""When routing counts as drifted, and when it is chance.

Run: .venv/bin/pytest tests/placement/test_drift.py
"""

from __future__ import annotations

import numpy as np
import pytest

from titan.placement.drift import DRIFTED, ENOUGH_ROWS, LOOKS_KEPT, RoutingDrift, chance_variation, total_variation
from titan.placement.routing import sample, weights_from_frequencies, zipf_layers

LAYERS, EXPERTS, TOP_K = 3, 16, 4
SKEWED = zipf_layers(LAYERS, EXPERTS, TOP_K, 1.0, seed=1)
OTHER = zipf_layers(LAYERS, EXPERTS, TOP_K, 1.0, seed=2)


def counts(frequencies: tuple[tuple[float, ...], ...], rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    drawn = [sample(weights_from_frequencies(row, TOP_K), TOP_K, rows, rng) for row in frequencies]
    seen = np.stack([np.bincount(ids.ravel(), minlength=EXPERTS) for ids in drawn])
    return seen, np.full(len(frequencies), rows)


def test_total_variation_is_the_share_that_moved() -> None:
    planned = np.array([[1.0, 1.0, 0.0, 0.0]])
    assert total_variation(planned, np.array([[0.0, 0.0, 1.0, 1.0]])) == pytest.approx([1.0])
    assert total_variation(planned, np.array([[1.0, 0.5, 0.5, 0.0]])) == pytest.approx([0.25])


def test_chance_explains_what_chance_does() -> None:
    for rows in (ENOUGH_ROWS, 4000):
        seen, many = counts(SKEWED, rows)
        planned = np.array(SKEWED)
        assert (total_variation(planned, seen / rows) <= chance_variation(planned, many) * 1.1).all()


def test_the_same_text_does_not_drift_and_other_text_does() -> None:
    same = RoutingDrift(LAYERS, EXPERTS, TOP_K, SKEWED)
    assert same.drift() == 0
    same.look(*counts(SKEWED, 2000))
    assert same.drift() < 0.02
    assert not same.drifted
    seen, rows = counts(SKEWED, 2000)
    more, again = counts(OTHER, 4000)
    same.look(seen + more, rows + again)  # totals go on
    assert same.drifted
    frequencies = same.seen()
    assert all(sum(row) == pytest.approx(TOP_K) for row in frequencies)
    same.planned_for(frequencies)
    assert same.drift() < 0.01


def test_little_is_not_enough_and_old_text_is_forgotten() -> None:
    drift = RoutingDrift(LAYERS, EXPERTS, TOP_K, None)
    seen, rows = counts(SKEWED, ENOUGH_ROWS - 1)
    drift.look(seen, rows)
    assert drift.drift() == 0
    assert np.allclose(drift.seen(), TOP_K / EXPERTS)
    more, again = counts(SKEWED, 2000, seed=1)
    drift.look(seen + more, rows + again)
    assert drift.drift() > DRIFTED, "nothing was planned for, and the text is skewed"
    for _ in range(LOOKS_KEPT):
        drift.look(seen + more, rows + again)
    assert drift.drift() == 0


def test_a_layer_that_never_asks_is_left_as_planned() -> None:
    drift = RoutingDrift(LAYERS, EXPERTS, TOP_K, SKEWED)
    seen, rows = counts(OTHER, 2000)
    seen[1], rows[1] = 0, 0
    drift.look(seen, rows)
    assert drift.drifted
    assert drift.seen()[1] == pytest.approx(SKEWED[1])
    assert drift.seen()[0] != pytest.approx(SKEWED[0])
