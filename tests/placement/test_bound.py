"""The bound against exhaustive search over small layers. Run: pytest tests/placement/test_bound.py"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from titan.placement.cost import Costs
from titan.placement.dispatch import choose
from titan.placement.routing import group_polynomial
from titan.placement.solver.layer_bound import LayerBound
from titan.placement.solver.outcome import Outcomes

EXPERTS, TOP_K = 6, 2
STEPS = [(0, 0), (1, 1), (2, EXPERTS)]


def random_costs(rng: np.random.Generator, workers: int) -> Costs:
    scale = rng.choice([0.5, 3.0, 20.0])
    same = rng.random() < 0.4
    pair = [1.0, *([2.0] * workers if same else rng.choice([0.5, 1.0, 2.5], workers))]
    base = [0.2, *([scale] * workers if same else scale * rng.uniform(0.5, 3.0, workers))]
    ssd = float(rng.choice([1.0, 6.0, 80.0]))
    return Costs(tuple(map(float, pair)), tuple(map(float, base)), (0.0,) * (workers + 1), ssd, int(rng.integers(1, 3)))


def exact_cost(holders: list[tuple[int, ...]], weights: np.ndarray, costs: Costs) -> float:
    """Expected cost of a layer when dispatch is optimal, by listing every routing."""
    total = value = 0.0
    for chosen in itertools.combinations(range(EXPERTS), TOP_K):
        chance = math.prod(weights[list(chosen)])
        total += chance
        value += chance * choose(chosen, holders, costs).latency_s
    return value / total


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("skew", [0.0, 0.3, 1.0])
def test_no_placement_is_cheaper_than_the_bound(seed: int, skew: float) -> None:
    rng = np.random.default_rng(seed)
    workers = int(rng.integers(1, 4))
    costs = random_costs(rng, workers)
    weights = np.arange(1, EXPERTS + 1, dtype=np.float64) ** -skew
    rng.shuffle(weights)
    outcomes = Outcomes(costs, list(range(1, workers + 1)), TOP_K)
    nearest = sorted(range(1, workers + 1), key=lambda n: costs.base_s[n] + costs.pair_s[n])
    deep = [outcomes.deep(costs, nearest[i:]) for i in range(1, workers + 1)]
    bound = LayerBound(weights, outcomes, TOP_K, workers, deep, STEPS, sync_s=0.0)
    options: list[tuple[int, ...]] = [(), (0,), *((n,) for n in range(1, workers + 1))]
    options += list(itertools.combinations(range(workers + 1), 2))
    assert bound.whole_s <= exact_cost([(0,)] * EXPERTS, weights, costs) + 1e-9
    for _ in range(150):
        holders = [options[i] for i in rng.integers(0, len(options) if rng.random() < 0.5 else workers + 2, EXPERTS)]
        missing = sum(not h for h in holders)
        away = sum(bool(h) and 0 not in h for h in holders)
        if EXPERTS - away - missing < TOP_K or away + missing == 0:
            continue
        slots = sum(sum(n > 0 for n in h) for h in holders)
        cost = exact_cost(holders, weights, costs)
        extra = slots - away
        tables = [core for low, core in zip(bound.extra, bound.core, strict=True) if low <= extra]
        assert min(core[away, missing] for core in tables) <= cost + 1e-9, (holders, costs)
        assert chain_value(bound, holders, nearest) <= cost + 1e-9, (holders, costs)


def chain_value(bound: LayerBound, holders: list[tuple[int, ...]], nearest: list[int]) -> float:
    away = [min((nearest.index(n) for n in h), default=len(nearest)) for h in holders if 0 not in h]
    return float(bound.chain_base[len(away)]) + sum(
        float(table[len(away), sum(level >= i for level in away)]) for i, table in enumerate(bound.chain, start=1)
    )


def test_flat_bound_is_attained_by_a_balanced_placement() -> None:
    costs = Costs((1.0, 1.0, 1.0), (0.0, 9.0, 9.0), (0.0,) * 3, 100.0, 1)
    weights = np.ones(EXPERTS)
    outcomes = Outcomes(costs, [1, 2], TOP_K)
    bound = LayerBound(weights, outcomes, TOP_K, 2, [outcomes.deep(costs, [])], STEPS, sync_s=0.25)
    assert bound.core[0][4, 0] == pytest.approx(exact_cost([(0,), (0,), (1,), (1,), (2,), (2,)], weights, costs) + 0.25)
    assert bound.whole_s == TOP_K


def test_group_polynomial_is_the_elementary_symmetric_one() -> None:
    weights = np.array([2.0, 3.0, 5.0])
    assert group_polynomial(weights, 3).tolist() == [1, 10, 31, 30]
    assert group_polynomial(np.ones(5), 2).tolist() == [1, 5, 10]
