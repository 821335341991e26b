"""Pairs are divided without loss and joined in the router's order.

Run: .venv/bin/pytest tests/coordinator/moe/test_pairs.py
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from titan.coordinator.moe.pairs import FEW_PAIRS, divide, join, used_rows


@pytest.mark.parametrize("pairs", [1, 8, FEW_PAIRS, FEW_PAIRS + 1, 1000])
def test_every_pair_has_one_place(pairs: int) -> None:
    rng = np.random.default_rng(pairs)
    experts = rng.integers(0, 40, pairs).astype(np.uint32)
    owners = {e: e % 3 for e in range(30)}  # the others are nobody's
    places = divide(experts, owners, 3)
    assert len(places) == 4
    assert sorted(np.concatenate(places).tolist()) == list(range(pairs))
    for number, mine in enumerate(places):
        assert np.all(np.diff(mine) > 0)
        assert all(owners.get(e, 3) == number for e in experts[mine].tolist())


def test_an_owner_of_nothing_here_gets_nothing() -> None:
    places = divide(np.array([1, 1], np.uint32), {1: 1, 7: 0}, 2)
    assert [p.tolist() for p in places] == [[], [0, 1], []]


def test_rows_travel_once() -> None:
    bits = np.arange(12, dtype=np.float32).reshape(4, 3)
    rows, pair_rows = used_rows(bits, np.array([3, 1, 3, 1], np.uint32))
    np.testing.assert_array_equal(rows, bits[[1, 3]])
    assert pair_rows.tolist() == [1, 0, 1, 0]
    np.testing.assert_array_equal(rows[pair_rows], bits[[3, 1, 3, 1]])
    everything, same = used_rows(bits, np.array([0, 1, 2, 3], np.uint32))
    assert everything is bits
    assert same.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_joined_in_the_order_of_the_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.standard_normal((20, 4), np.float32)
    owner = rng.integers(0, 3, 20)
    positions = [np.flatnonzero(owner == n) for n in range(3)]
    rng.shuffle(positions)
    joined = join([mx.array(y[p]) for p in positions], positions, 20)
    np.testing.assert_array_equal(np.array(joined), y)


def test_two_parts_that_changed_places_are_put_right() -> None:
    y = np.arange(4, dtype=np.float32)[:, None]
    positions = [np.array([2, 3]), np.array([0, 1])]  # a permutation that is its own inverse
    joined = join([mx.array(y[2:]), mx.array(y[:2])], positions, 4)
    np.testing.assert_array_equal(np.array(joined), y)
