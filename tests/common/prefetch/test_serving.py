"""Prefetch and every policy on the demo model: the same tokens as with everything at home."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan.common.config.hosts import HostsConfig
from titan.common.prefetch.build import make_prefetcher
from titan.common.registry import open_checkpoint
from titan.common.slots import Forecast
from titan.common.slots.buffers import slot_bytes
from titan.coordinator.bench.alone import greedy_tokens
from titan.coordinator.bench.local import load_alone
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.generation.model import LoadedModel
from titan.deploy import DEMO_MODEL

PROMPT = [5, 17, 29, 41]
TOKENS = 40


def load(
    slots: int, policy: str = "lru", prefetch: str = "off", folder: Path | None = None
) -> tuple[Cluster, LoadedModel]:
    checkpoint = open_checkpoint(DEMO_MODEL)
    memory = slots * sum(slot_bytes(spec, "float32") for spec in checkpoint.shape.layers)
    hosts = HostsConfig.model_validate({"model": str(DEMO_MODEL), "coordinator": {"memory": memory}})
    cluster = Cluster(hosts, checkpoint, None, ClusterOptions(policy=policy, prefetch=prefetch, figures_folder=folder))
    return cluster, cluster.load()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    _, loaded = load_alone(open_checkpoint(DEMO_MODEL))
    tokens = greedy_tokens(loaded, PROMPT, TOKENS, lookahead=True)
    loaded.close()
    return tokens


@pytest.mark.parametrize("prefetch", ["off", "auto", "previous", "transition", "probe"])
@pytest.mark.parametrize("policy", ["lru", "forecast"])
def test_the_tokens_are_the_same(expected: list[int], prefetch: str, policy: str) -> None:
    cluster, loaded = load(8, policy=policy, prefetch=prefetch)
    assert cluster.dispatcher is not None
    if prefetch != "off":
        assert cluster.dispatcher.prefetcher is not None
        assert cluster.model is not None
        cluster.dispatcher.prefetcher = make_prefetcher(
            prefetch, list(cluster.layers.values()), 32, 4, dict(enumerate(cluster.model.routers)), forced=2
        )
    assert greedy_tokens(loaded, PROMPT, TOKENS) == expected
    prefetched = sum(layer.table.counts.prefetched for layer in cluster.layers.values())
    assert (prefetched > 0) == (prefetch != "off")
    loaded.close()


def test_the_condition_keeps_it_silent_where_reads_are_cheaper_than_handing_them_over(expected: list[int]) -> None:
    cluster, loaded = load(8, prefetch="auto")
    assert cluster.dispatcher is not None
    prefetcher = cluster.dispatcher.prefetcher
    assert prefetcher is not None
    assert greedy_tokens(loaded, PROMPT, TOKENS) == expected
    assert prefetcher.steps > 0
    assert prefetcher.measures.fetch_s > 0
    assert max(score.recall(4) for row in prefetcher.scores for score in row) > 0.2, "the shadow scores nothing"
    loaded.close()


def test_what_was_learned_is_there_after_a_restart(expected: list[int], tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        cluster, loaded = load(8, policy="forecast", prefetch="auto", folder=tmp_path)
        policies = [layer.table.policy for layer in cluster.layers.values()]
        seen.append(max(p.foresight.steps[0] for p in policies if isinstance(p, Forecast)))
        assert greedy_tokens(loaded, PROMPT, TOKENS) == expected
        loaded.close()
    assert seen[0] == 0
    assert seen[1] >= TOKENS - 1
