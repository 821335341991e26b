"""The bound by shares against listed routings and optima. Run: pytest tests/placement/test_shares.py"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from fixtures.placement_cases import FAR, optimum_with_replicas, uneven_case

from titan.placement.bench_cases import small_case
from titan.placement.evaluate import Evaluator
from titan.placement.problem import Problem
from titan.placement.routing import prefix_polynomials
from titan.placement.solver.bound import layer_kinds
from titan.placement.solver.cells import Priced, Ranked, bounded, certify
from titan.placement.solver.exact import by_counts, by_routing
from titan.placement.solver.fitting import Fitting
from titan.placement.solver.shares import Shares

EXPERTS, TOP_K = 8, 3


def by_shares(problem: Problem) -> float:
    """Seconds of a step by the shares alone."""
    evaluator = Evaluator(problem)
    kinds = [(layers[0], len(layers), size) for (_, size), layers in layer_kinds(evaluator).items()]
    found = Shares(evaluator, kinds).bound(0.0, FAR, 2000)
    return evaluator.fixed_s + (found or 0.0)


def fitting(rng: np.random.Generator, weights: np.ndarray, columns: int, pieces: int = 5) -> Fitting:
    """Rooms that grow, like those of times: nodes, then experts with two holders, then missing ones."""
    room = np.sort(rng.integers(0, TOP_K + 1, (pieces, columns)), axis=0)
    room[:, -2], room[:, -1] = np.minimum(room[:, :-2].sum(axis=1), TOP_K), 0
    total = float(prefix_polynomials(weights, TOP_K)[-1, TOP_K])
    return Fitting(rng.uniform(0.1, 1.0, pieces), room, TOP_K, total)


def weights_of(rng: np.random.Generator) -> np.ndarray:
    weights = np.arange(1, EXPERTS + 1) ** -float(rng.choice([0.0, 0.5, 1.5]))
    return weights / weights.mean()


def done_chance(weights: np.ndarray, column: np.ndarray, room: np.ndarray) -> float:
    """Chance that the selected experts of every column find room; those with two holders are in a column themselves."""
    total = value = 0.0
    for chosen in itertools.combinations(range(EXPERTS), TOP_K):
        chance = math.prod(weights[list(chosen)])
        total += chance
        value += chance * bool((np.bincount(column[list(chosen)], minlength=len(room)) <= room).all())
    return value / total


@pytest.mark.parametrize("seed", range(12))
def test_chances_bound_listed_routings_and_boxes_bound_their_points(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights, columns = weights_of(rng), int(rng.integers(4, 7))
    fit, ranked = fitting(rng, weights, columns), Ranked(weights, TOP_K)
    priced = Priced(fit, ranked, np.append(rng.uniform(0.0, 0.2, columns - 1), 0.0))
    for _ in range(15):
        column = rng.integers(0, columns, EXPERTS)
        share = np.array([weights[column == n].sum() for n in range(columns)])[:, None]
        exact = np.array([done_chance(weights, column, room) for room in fit.room])
        chance, _ = fit.chances(share, ranked.most(share))
        assert (chance[:, 0] >= exact * (1 - 1e-9) - 1e-12).all()
        assert (exact <= ranked.spared(share[-1]) + 1e-12).all()
        counts = np.bincount(column, minlength=columns)
        cost = fit.length_s @ (1 - exact) + priced.price_s @ counts
        assert priced.memory(share)[0][0] <= priced.price_s @ counts + 1e-12
        wide = rng.choice([0.0, 0.5, 3.0, EXPERTS])
        low, high = np.maximum(share - wide * rng.random(share.shape), 0.0), share + wide * rng.random(share.shape)
        box = bounded(priced, low, high)
        assert len(box.least_s) == 1
        assert box.least_s[0] <= cost * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_certified_cost_is_below_every_arrangement_and_near_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights, columns = np.ones(EXPERTS), 4
    fit = fitting(rng, weights, columns)
    priced = Priced(fit, Ranked(weights, TOP_K), np.append(rng.uniform(0.02, 0.1, columns - 1), 0.0))
    best = math.inf
    for counts in itertools.product(range(EXPERTS + 1), repeat=columns):
        if sum(counts) == EXPERTS:
            exact = [done_chance(weights, np.repeat(np.arange(columns), counts), room) for room in fit.room]
            best = min(best, float(fit.length_s @ (1 - np.array(exact)) + priced.price_s @ np.array(counts)))
    roots = [(np.zeros(columns), np.full(columns, float(EXPERTS)))]
    value, _ = certify(priced, roots, 2 * best, FAR, 20_000)
    assert 0.9 * best <= value <= best * (1 + 1e-9)
    early, _ = certify(priced, roots, 2 * best, 0.0, 20_000)
    assert early <= value


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_no_placement_with_replicas_beats_the_shares(seed: int) -> None:
    problem = uneven_case(seed, experts=4 + seed % 2)
    assert by_shares(problem) <= optimum_with_replicas(problem) * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(100, 115))
def test_no_placement_of_counts_beats_the_shares(seed: int) -> None:
    problem = uneven_case(seed, experts=9, layers=3)
    assert by_shares(problem) <= by_counts(Evaluator(problem)) * (1 + 1e-6)


@pytest.mark.parametrize("seed", [20, 21, 23, 24])
def test_no_placement_of_skewed_experts_beats_the_shares(seed: int) -> None:
    problem = small_case(seed, flat=False)
    best, proven = by_routing(Evaluator(problem), 20.0)
    assert proven
    assert by_shares(problem) <= best * (1 + 1e-4)
