"""Prompts read past the slots on the demo model: the same tokens, within M_0."""

from __future__ import annotations

import pytest

from titan.common.config.hosts import HostsConfig
from titan.common.registry import open_checkpoint
from titan.common.slots.buffers import slot_bytes
from titan.coordinator.bench.alone import greedy_tokens
from titan.coordinator.bench.local import load_alone
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.deploy import DEMO_MODEL

PROMPT = [(37 * i) % 1900 + 5 for i in range(120)]
TOKENS = 20


@pytest.fixture(scope="module")
def expected() -> list[int]:
    _, loaded = load_alone(open_checkpoint(DEMO_MODEL))
    tokens = greedy_tokens(loaded, PROMPT, TOKENS, lookahead=True)
    loaded.close()
    return tokens


@pytest.mark.parametrize(("slots", "share"), [(8, 0), (8, 1), (12, 4), (32, 4), (40, 4)])
def test_the_tokens_are_the_same_and_the_memory_is_bounded(expected: list[int], slots: int, share: int) -> None:
    checkpoint = open_checkpoint(DEMO_MODEL)
    layer_bytes = sum(slot_bytes(spec, "float32") for spec in checkpoint.shape.layers)
    memory = slots * layer_bytes
    hosts = HostsConfig.model_validate({"model": str(DEMO_MODEL), "coordinator": {"memory": memory}})
    cluster = Cluster(hosts, checkpoint, None, ClusterOptions(stream_bytes=share * layer_bytes))
    loaded = cluster.load()
    assert greedy_tokens(loaded, PROMPT, TOKENS) == expected
    held = sum(layer.buffers.nbytes for layer in cluster.layers.values())
    stream = cluster.stream
    assert held + (stream.nbytes if stream else 0) <= memory
    streamed = sum(layer.table.counts.streamed for layer in cluster.layers.values())
    if slots >= 32 or share == 0:  # everything fits, or nothing was allowed
        assert stream is None
        assert streamed == 0
    else:
        assert stream is not None
        assert stream.width == 4 * share  # 8 layers of equal experts, two buffers
        assert streamed > 0
    loaded.close()
    assert cluster.stream is None
