"""Condition (9) on the formulation's own figures, and the measures it is fed with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titan.common.prefetch.budget import Costs, prefetch_gain
from titan.common.prefetch.measures import Average, Measures


def test_condition_9_of_the_laptop() -> None:
    """tau_l 0.128 ms, page cache 0.21 ms, cold 0.43 ms, LAN 28 ms; q about 0.5 at depth 1 lost throughput."""
    one_ahead = Costs(fetch_s=0.21e-3, layer_s=0.128e-3, useless_s=0.15e-3, readers=4, saved_s=0.21e-3)
    assert prefetch_gain([0.5], 1, one_ahead) == (0, 0.0)
    m, gain = prefetch_gain([0.9], 1, replace(one_ahead, useless_s=0.05e-3))
    assert m == 1
    assert gain == pytest.approx(0.9 * 0.128e-3 - 0.05e-3)
    # with d = 2 the whole page-cache fetch is hidden, with d = 4 the cold one
    assert prefetch_gain([1.0], 2, replace(one_ahead, useless_s=0.0))[1] == pytest.approx(0.21e-3)
    cold = Costs(fetch_s=0.43e-3, layer_s=0.128e-3, useless_s=0.0, readers=4, saved_s=0.43e-3)
    assert prefetch_gain([1.0], 3, cold)[1] == pytest.approx(3 * 0.128e-3)
    assert prefetch_gain([1.0], 4, cold)[1] == pytest.approx(0.43e-3)


def test_it_reads_on_while_the_next_expert_still_pays() -> None:
    costs = Costs(fetch_s=1e-3, layer_s=2e-3, useless_s=0.3e-3, readers=8, saved_s=1e-3)
    m, gain = prefetch_gain([0.8, 0.5, 0.2, 0.1], 1, costs)
    assert m == 2
    assert gain == pytest.approx((0.8 - 0.3 + 0.5 - 0.3) * 1e-3)


def test_of_several_that_are_missed_together_one_saves_its_share() -> None:
    together = Costs(fetch_s=1e-3, layer_s=2e-3, useless_s=0.3e-3, readers=8, saved_s=0.25e-3)
    assert prefetch_gain([0.9, 0.9], 1, together) == (0, 0.0)


def test_prefetches_queue_behind_one_another_and_leave_a_reader() -> None:
    slow = Costs(fetch_s=1e-3, layer_s=1.5e-3, useless_s=0.0, readers=2, saved_s=1e-3)
    assert prefetch_gain([1.0, 1.0, 1.0], 1, slow)[1] == pytest.approx(1.5e-3)  # 1.0 + 0.5 + 0
    assert prefetch_gain([1.0], 1, replace(slow, readers=1)) == (0, 0.0)


def test_averages_follow_and_outliers_are_held_back() -> None:
    average = Average()
    for _ in range(20):
        average.add(1.0)
    average.add(1000.0)
    assert 1.0 < average.value < 2.0


def test_a_useless_prefetch_costs_what_it_slows() -> None:
    measures = Measures(readers=4)
    for _ in range(50):
        measures.add_layer(1e-3, flying=0, begun=0)
        measures.add_layer(1.4e-3, flying=6, begun=2)
        measures.submit.add(20e-6)
        measures.add_demand(8e-3, experts=5, flying=0)  # two rounds of four readers
    assert measures.layer_s == pytest.approx(1e-3)
    assert measures.fetch_s == pytest.approx(4e-3)
    assert measures.saved_s == pytest.approx(1.6e-3)
    assert measures.useless_s == pytest.approx(20e-6 + 0.2e-3)
