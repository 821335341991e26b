"""The cheapest executor for each expert of a layer.

Run: .venv/bin/pytest tests/coordinator/moe/test_choice.py
"""

from __future__ import annotations

import numpy as np

from titan.coordinator.moe.choice import MAX_ROWS, choose_nodes
from titan.placement.cost import Costs

#                      home   worker 1  worker 2
COSTS = Costs(pair_s=(20e-6, 20e-6, 20e-6), base_s=(10e-6, 500e-6, 500e-6), fixed_s=(0, 0, 0), ssd_s=5e-3, readers=1)
HELD = [(1, frozenset({0, 1, 2, 3})), (2, frozenset({2, 3, 4, 5}))]


def test_what_is_here_stays_here_when_no_round_trip_is_needed() -> None:
    assert choose_nodes(np.array([[0, 1, 4]]), HELD, {0, 1, 4}, COSTS) == {}


def test_an_expert_that_is_nowhere_else_goes_to_its_holder_unless_reading_is_cheaper() -> None:
    assert choose_nodes(np.array([[0, 9]]), HELD, {9}, COSTS) == {0: 1}
    cheap_disk = Costs(COSTS.pair_s, COSTS.base_s, COSTS.fixed_s, ssd_s=50e-6, readers=4)
    assert choose_nodes(np.array([[0, 9]]), HELD, {9}, cheap_disk) == {}


def test_replicas_share_the_work() -> None:
    slow = Costs((1e-3, 1e-3, 1e-3), COSTS.base_s, COSTS.fixed_s, ssd_s=1.0, readers=1)
    chosen = choose_nodes(np.array([[2, 3]]), HELD, {}, slow)
    assert sorted(chosen.values()) == [1, 2]


def test_a_worker_that_is_not_ready_is_not_asked() -> None:
    assert choose_nodes(np.array([[0, 4]]), HELD[1:], {}, COSTS) == {4: 2}
    assert choose_nodes(np.array([[0, 4]]), [], {}, COSTS) == {}


def test_batches_and_prefill_cover_every_expert_that_is_not_here() -> None:
    rng = np.random.default_rng(3)
    for rows in (2, MAX_ROWS, MAX_ROWS + 1, 300):
        experts = np.array([rng.permutation(6)[:3] for _ in range(rows)])
        chosen = choose_nodes(experts, HELD, {5}, COSTS)
        assert set(chosen) == set(experts.reshape(-1).tolist()) - {5}
        for expert, node in chosen.items():
            assert expert in dict(HELD)[node]
