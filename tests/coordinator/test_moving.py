"""Slots change between two steps on one machine: what was learned and read stays, the tokens too.

Run: .venv/bin/pytest tests/coordinator/test_moving.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.plans import Holder, all_local, all_ssd, make_plan

from titan.common.config.hosts import HostsConfig
from titan.common.registry import open_checkpoint
from titan.common.slots import Forecast
from titan.coordinator.bench.alone import greedy_tokens
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.generation.model import LoadedModel
from titan.coordinator.moving import begin_move, finish_move, move_layer
from titan.deploy import DEMO_MODEL
from titan.placement import Plan

PROMPT = [5, 17, 29, 41]
CHECKPOINT = open_checkpoint(DEMO_MODEL)
HOSTS = HostsConfig.model_validate({"model": str(DEMO_MODEL)})


def plan_of(holder: Holder, cache_slots: int) -> Plan:
    return make_plan(CHECKPOINT, (HOSTS.coordinator.name,), holder, cache_slots)


def first_whole(layer: int, expert: int) -> tuple[int, ...]:
    return (0,) if layer == 0 or expert < 4 else ()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[Cluster, LoadedModel]]:
    options = ClusterOptions(
        plan=plan_of(all_ssd, 8), policy="forecast", prefetch="transition", figures_folder=tmp_path
    )
    cluster = Cluster(HOSTS, CHECKPOINT, None, options)
    yield cluster, cluster.load()
    cluster.close()


def move(cluster: Cluster, plan: Plan) -> None:
    for position in begin_move(cluster, plan):
        move_layer(cluster, plan, position)
    finish_move(cluster, plan)


def test_a_move_keeps_what_was_learned_and_read(started: tuple[Cluster, LoadedModel]) -> None:
    cluster, loaded = started
    assert cluster.dispatcher is not None
    expected = greedy_tokens(loaded, PROMPT, 24)
    prefetcher, layer = cluster.dispatcher.prefetcher, cluster.layers[3]
    assert prefetcher is not None
    steps, lookups, held = prefetcher.steps, layer.table.counts.hits + layer.table.counts.misses, set(layer.table.slots)
    assert isinstance(layer.table.policy, Forecast)
    learned = float(layer.table.policy.foresight.steps[0])
    assert learned > 20

    reads = cluster.store.counts.experts
    move(cluster, plan_of(first_whole, 6))
    assert not loaded.lookahead()
    assert cluster.dispatcher.prefetcher is prefetcher
    moved = cluster.layers[3]
    assert moved is not layer
    assert moved.table.capacity == 10
    assert moved.table.pinned == {0, 1, 2, 3}
    kept = set(sorted(held - {0, 1, 2, 3}, key=lambda e: -moved.table.uses[e])[:6])
    assert set(moved.table.slots) == {0, 1, 2, 3} | kept
    assert isinstance(moved.table.policy, Forecast)
    assert moved.table.policy.foresight.steps[0] == learned
    assert moved.table.counts.hits + moved.table.counts.misses == lookups
    assert cluster.store.counts.experts - reads <= 32 + 7 * 4 - len(held & {0, 1, 2, 3}), "it was in memory"
    assert greedy_tokens(loaded, PROMPT, 24) == expected
    assert prefetcher.steps > steps
    assert moved.table.policy.foresight.steps[0] > learned

    move(cluster, plan_of(all_local, 0))
    assert loaded.lookahead()
    assert cluster.dispatcher.prefetcher is None
    assert greedy_tokens(loaded, PROMPT, 24, lookahead=True) == expected
    move(cluster, plan_of(all_ssd, 8))
    assert not loaded.lookahead()
    assert cluster.dispatcher.prefetcher is not None
    assert greedy_tokens(loaded, PROMPT, 24) == expected


def test_the_next_start_reads_the_most_used_experts_first(started: tuple[Cluster, LoadedModel]) -> None:
    cluster, loaded = started
    for layer in cluster.layers.values():  # nothing is known yet: as many as fit
        assert set(layer.table.slots) == set(range(8))
        assert layer.table.counts.installed == 8
        assert layer.table.counts.stall_s == 0
    greedy_tokens(loaded, PROMPT, 40)
    uses = {index: dict(layer.table.uses) for index, layer in cluster.layers.items()}
    loaded.close()

    again = Cluster(HOSTS, CHECKPOINT, None, cluster.options)
    again.load()
    try:
        for index, layer in again.layers.items():
            most = sorted(range(32), key=lambda e: -uses[index].get(e, 0))[:8]
            assert set(layer.table.slots) == set(most)
            assert layer.table.pinned == set()
    finally:
        again.close()
