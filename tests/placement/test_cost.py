"""The source's own figures. Run: pytest tests/placement/test_cost.py"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from titan.placement import cost
from titan.placement.values import Node

LAYER_S = 0.128e-3  # 489 tokens/s over 16 layers


def test_layer_time_of_the_source() -> None:
    assert pytest.approx(LAYER_S, rel=0.01) == 1 / 489 / 16


@pytest.mark.parametrize(("fetch_s", "depth"), [(0.21e-3, 2), (0.43e-3, 4), (28e-3, None)])
def test_prefetch_depth_that_hides_a_fetch(fetch_s: float, depth: int | None) -> None:
    assert cost.depth_to_hide(fetch_s, LAYER_S, layers=16) == depth


def test_gain_removes_the_stall_only_from_that_depth_on() -> None:
    stalls = [cost.stall_with_prefetch(8, 0.5, 1.0, 4, 0.43e-3, d, LAYER_S) for d in range(5)]
    assert stalls[0] == pytest.approx(cost.stall_without_prefetch(8, 0.5, 4, 0.43e-3))
    assert all(a > b for a, b in pairwise(stalls))
    assert stalls[3] > 0
    assert stalls[4] == 0


def test_a_lan_fetch_is_never_hidden_within_a_token() -> None:
    assert cost.stall_with_prefetch(8, 0.5, 1.0, 4, 28e-3, 15, LAYER_S) > 25e-3


def test_condition_9_fails_for_the_one_layer_experiment() -> None:
    def pays(depth: int, precision: float) -> bool:
        return cost.prefetch_can_pay(8, 0.57, 0.5, precision, 8, 0.43e-3, depth, LAYER_S, install_s=0.1e-3)

    assert not pays(1, 0.5)  # d = 1, q about 0.5: the source lost throughput
    assert pays(4, 0.8)
    assert not cost.prefetch_can_pay(8, 1.0, 1.0, 1.0, 8, 1.0, 4, 1.0, 0.0)


def test_gain_follows_the_equation() -> None:
    # K(1-h) = 4, r' = 0.75: one unseen in one round of 2 readers, three seen in two rounds
    assert cost.stall_with_prefetch(8, 0.5, 0.75, 2, 1.0, 1, 0.25) == pytest.approx(1 * 1.0 + 2 * 0.75)


def test_layer_latency_charges_a_round_trip_only_where_experts_ran() -> None:
    nodes = (Node("home", 0, 20e-6), Node("mini", 0, 30e-6, round_trip_s=500e-6))
    costs = cost.Costs.of(nodes)
    home = cost.layer_latency([8, 0], costs.pair_s, costs.base_s, 1e-4, 0.0)
    spread = cost.layer_latency([5, 3], costs.pair_s, costs.base_s, 1e-4, 2e-4)
    assert home == pytest.approx(1e-4 + 160e-6)
    assert spread == pytest.approx(1e-4 + 500e-6 + 90e-6 + 2e-4)


def test_step_latency_sums_layers_and_batches_over_steps() -> None:
    counts = np.array([[[8, 0], [5, 3]], [[8, 0], [8, 0]]])
    steps = cost.step_latency(counts, [1.0, 1.0], [0.0, 10.0], [0.5, 0.5], np.zeros((2, 2)))
    assert steps == pytest.approx([0.5 + 8 + 0.5 + 13, 17.0])


def test_bytes_on_the_link_are_part_of_the_round_trip() -> None:
    nodes = (Node("home", 0, 1.0), Node("far", 0, 1.0, round_trip_s=2.0, bandwidth_bytes_s=100.0))
    costs = cost.Costs.of(nodes, activation_bytes=50)
    assert costs.pair_s == (1.0, 1.5)
    assert costs.base_s == (0.0, 2.5)


def test_stall_is_the_longest_wait_that_no_lead_covers() -> None:
    assert cost.stall([]) == 0
    assert cost.stall([0.21, 0.43]) == 0.43
    assert cost.stall([0.21, 0.43], [0.3, 0.4]) == pytest.approx(0.03)
    assert cost.miss_stall([0, 1, 4, 5], 0.5, 4) == pytest.approx([0, 0.5, 0.5, 1.0])


def test_objective_weighs_energy_and_traffic() -> None:
    assert cost.energy([10, 5], [0.1, 0.2]) == pytest.approx(2.0)
    assert cost.communication([1e-9, 2e-9], [1000, 500], [0, 500]) == pytest.approx(3e-6)
    assert cost.objective([1.0, 3.0], [2.0, 2.0], [4.0, 4.0], energy_weight=0.5, traffic_weight=0.25) == 4.0


def test_page_cache_is_taken_when_warm() -> None:
    node = Node("home", 0, 1.0, ssd_s=0.43, page_cache_s=0.21)
    assert cost.Costs.of((node,)).ssd_s == 0.43
    assert cost.Costs.of((node,), warm=True).ssd_s == 0.21
