"""The bound against exhaustive search over small layers. Run: pytest tests/placement/test_bound.py"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from titan.placement.cost import Costs
from titan.placement.dispatch import choose
from titan.placement.routing import group_polynomial
from titan.placement.solver.classes import WorkerClass
from titan.placement.solver.layer_bound import LayerBound
from titan.placement.solver.outcome import Outcomes
from titan.placement.solver.rooms import levels, own_levels, split

EXPERTS, TOP_K = 7, 3
BUCKETS = [(0, 0), (1, 2), (3, EXPERTS)]


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


def layer_bound(
    costs: Costs, weights: np.ndarray, rng: np.random.Generator, sync_s: float = 0.0
) -> tuple[LayerBound, list[WorkerClass]]:
    """The bound of one layer, the workers divided into classes at random."""
    nearest = sorted(range(1, len(costs.pair_s)), key=lambda n: costs.base_s[n] + costs.pair_s[n])
    cuts = [0, *(i for i in range(1, len(nearest)) if rng.random() < 0.6), len(nearest)]
    groups = [tuple(nearest[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
    classes = [WorkerClass(g, costs.base_s[g[0]] + costs.pair_s[g[0]], 0) for g in groups]
    outcomes = Outcomes(costs, nearest, TOP_K)
    deep = [outcomes.deep(costs, [n for c in classes[i:] for n in c.members]) for i in range(1, len(classes) + 1)]
    home_s = float(outcomes.home[TOP_K])
    cut = [split(level, TOP_K, home_s) for level in levels(costs, classes, TOP_K)]
    own = own_levels(costs, classes, TOP_K) if rng.random() < 0.8 else None
    sizes = [len(c.members) for c in classes]
    intervals = int(rng.integers(1, 6))
    return LayerBound(
        weights, cut, outcomes, deep, TOP_K, BUCKETS, sizes, sync_s, costs.ssd_s, own=own, intervals=intervals
    ), classes


def bound_of(bound: LayerBound, classes: list[WorkerClass], holders: list[tuple[int, ...]]) -> float:
    """The bound's value for a placement: every level at the placement's own counts."""
    level = {0: 0} | {n: i for i, c in enumerate(classes, start=1) for n in c.members}
    held = [sorted(level[n] for n in h) for h in holders]
    farther = [sum(not h or h[0] > i for h in held) for i in range(len(classes) + 1)]
    u, total = farther[0], float(bound.base[farther[0]])
    for i in range(1, len(classes) + 1):
        second = sum(len(h) > 1 and h[1] <= i for h in held)
        bucket = next(b for b, (_, most) in enumerate(BUCKETS) if second <= most)
        x, own = farther[i], bound.own(i, bucket)
        level_s = float(bound.level(i, bucket)[u, x])
        total += level_s if own is None else max(level_s, float(own[farther[i - 1], x]))
        total += float(bound.reads(i)[u, x])
    return total


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("skew", [0.0, 0.4, 1.5])
def test_no_placement_of_a_layer_is_cheaper_than_its_bound(seed: int, skew: float) -> None:
    rng = np.random.default_rng(seed)
    workers = int(rng.integers(1, 5))
    costs = random_costs(rng, workers)
    weights = np.arange(1, EXPERTS + 1, dtype=np.float64) ** -skew
    rng.shuffle(weights)
    bound, classes = layer_bound(costs, weights, rng)
    options: list[tuple[int, ...]] = [(), (0,), *((n,) for n in range(1, workers + 1))]
    options += list(itertools.combinations(range(workers + 1), 2))
    tightest = 0.0
    for _ in range(60):
        holders = [options[i] for i in rng.integers(0, len(options) if rng.random() < 0.5 else workers + 2, EXPERTS)]
        away = sum(0 not in h for h in holders)
        if 0 < EXPERTS - away < TOP_K or away == EXPERTS:
            continue
        cost = exact_cost(holders, weights, costs)
        value = bound_of(bound, classes, holders)
        assert value <= cost * (1 + 1e-9) + 1e-12, (holders, costs)
        tightest = max(tightest, value / cost)
    assert tightest > 0.3  # a bound that says nothing is no bound


def test_the_bound_is_attained_by_whole_layers_and_by_balanced_ones() -> None:
    costs = Costs((1.0, 1.0, 1.0), (0.0, 9.0, 9.0), (0.0,) * 3, 100.0, 1)
    weights = np.ones(EXPERTS)
    outcomes = Outcomes(costs, [1, 2], TOP_K)
    classes = [WorkerClass((1, 2), 10.0, 0)]
    cut = [split(level, TOP_K, TOP_K) for level in levels(costs, classes, TOP_K)]
    bound = LayerBound(weights, cut, outcomes, [outcomes.deep(costs, [])], TOP_K, BUCKETS, [2], 0.25, 100.0)
    even = [(0,), (0,), (0,), (1,), (1,), (2,), (2,)]
    assert bound_of(bound, classes, even) == pytest.approx(exact_cost(even, weights, costs) + 0.25)
    assert bound_of(bound, classes, [(0,)] * EXPERTS) == pytest.approx(TOP_K)


def test_group_polynomial_is_the_elementary_symmetric_one() -> None:
    weights = np.array([2.0, 3.0, 5.0])
    assert group_polynomial(weights, 3).tolist() == [1, 10, 31, 30]
    assert group_polynomial(np.ones(5), 2).tolist() == [1, 5, 10]
