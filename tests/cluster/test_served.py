"""Workers that read experts from their own copies: the same tokens, few slots, hints or none, disks that fail.

Run: .venv/bin/pytest tests/cluster/test_served.py
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fixtures.plans import make_plan
from fixtures.reference import load_reference, logits_of, reference_logits, reference_tokens, titan_tokens
from fixtures.worker_server import wait_until

from titan.common.prefetch.build import make_prefetcher
from titan.common.registry import open_checkpoint
from titan.common.slots.buffers import slot_bytes
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.remote.hints import HintSender
from titan.deploy import DEMO_MODEL

NODES = ("coordinator", "worker-1", "worker-2")
PATIENT = {"timeouts": {"execute": "4s"}}
PROMPT = list(range(20, 40))


def some_held(layer: int, expert: int) -> tuple[int, ...]:
    """Most experts in nobody's memory; some on each node."""
    return ((0,), (1,), (), (), (2,), (), ())[(expert + layer) % 7]


@pytest.fixture(scope="module")
def loopback() -> Iterator[LoopbackCluster]:
    with LoopbackCluster(DEMO_MODEL, own_copies=True, settings=PATIENT) as cluster:
        yield cluster


def served_by_workers(cluster: Cluster) -> int:
    """Reads that requests waited for on both workers, as they last said."""
    found = 0
    for link in cluster.links:
        link.last_status = None
        wait_until(lambda link=link: link.last_status is not None, "a worker's status")
        assert link.last_status is not None
        found += link.last_status.cache.loads
    return found


@pytest.mark.parametrize("slots", [2, 6])
def test_experts_in_nobodys_memory_are_read_by_workers(loopback: LoopbackCluster, slots: int) -> None:
    reference = load_reference(DEMO_MODEL)
    plan = make_plan(loopback.checkpoint, NODES, some_held, worker_slots=slots)
    assert sum(map(len, plan.served_by(1))) > 0
    cluster = loopback.coordinator(ClusterOptions(plan=plan))
    try:
        loaded = cluster.load()
        assert cluster.dispatcher is not None
        assert titan_tokens(loaded, PROMPT, 24) == reference_tokens(reference, PROMPT, 24)
        batch = [np.random.default_rng(seed).integers(3, 2000, 70).tolist() for seed in (2, 3, 4)]
        expected = reference_logits(reference, batch, steps=3)
        found = logits_of(loaded.model, loaded.make_cache(), batch, steps=3)
        for want, have in zip(expected, found, strict=True):
            np.testing.assert_array_equal(have, want)
        executed = cluster.dispatcher.executed
        assert executed.fallbacks == 0
        assert served_by_workers(cluster) > 50
        for link in cluster.links:
            assert link.ready is not None
            assert link.ready.times.served_s
            assert link.fetch_s
    finally:
        cluster.close()


@pytest.mark.parametrize("transport", ["lane", "grpc"])
def test_hints_change_no_token(transport: str) -> None:
    reference = load_reference(DEMO_MODEL)
    with LoopbackCluster(DEMO_MODEL, own_copies=True, settings=PATIENT | {"transport": transport}) as loopback:
        plan = make_plan(loopback.checkpoint, NODES, lambda _layer, _expert: (), worker_slots=8)
        cluster = loopback.coordinator(ClusterOptions(plan=plan, policy="forecast"))
        try:
            loaded = cluster.load()
            assert cluster.dispatcher is not None
            assert cluster.model is not None
            sender = HintSender(cluster.links)
            routers = dict(enumerate(cluster.model.routers))
            cluster.dispatcher.prefetcher = make_prefetcher(
                "probe", list(cluster.layers.values()), 32, 4, routers, forced=4, remote=sender
            )
            assert titan_tokens(loaded, PROMPT, 40) == reference_tokens(reference, PROMPT, 40)
            assert cluster.dispatcher.executed.fallbacks == 0
            assert sender.sent > 100
            served_by_workers(cluster)
            caches = [link.last_status.cache for link in cluster.links if link.last_status is not None]
            assert all(cache.hints > 0 for cache in caches)
            assert sum(cache.useful for cache in caches) > 20
        finally:
            cluster.close()


def test_hosts_yaml_gives_a_worker_cache_slots() -> None:
    eight = 8 * sum(slot_bytes(spec, "float32") for spec in open_checkpoint(DEMO_MODEL).shape.layers)
    with LoopbackCluster(DEMO_MODEL, own_copies=True, settings=PATIENT, worker_bytes=eight) as loopback:
        workers = [worker.model_copy(update={"cache_slots": 3}) for worker in loopback.hosts.workers]
        loopback.hosts = loopback.hosts.model_copy(update={"workers": tuple(workers)})
        cluster = loopback.coordinator(ClusterOptions())
        try:
            loaded = cluster.load()
            plan = cluster.plan
            assert plan is not None
            short = [i for i, row in enumerate(plan.residency) if row.count(()) > plan.cache_slots(i)]
            assert short, "the demo cluster holds everything: give it less memory"
            assert all(plan.cache_slots(i, node) == 3 for i in short for node in (1, 2))
            expected = reference_tokens(load_reference(DEMO_MODEL), PROMPT, 12)
            assert titan_tokens(loaded, PROMPT, 12) == expected
        finally:
            cluster.close()


def test_a_worker_whose_disk_fails_is_replaced_by_this_machine(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, copy)
    with LoopbackCluster(copy, own_copies=True, settings=PATIENT) as loopback:
        plan = make_plan(loopback.checkpoint, NODES, lambda _layer, _expert: (), worker_slots=4)
        loopback.checkpoint = open_checkpoint(DEMO_MODEL)
        cluster = loopback.coordinator(ClusterOptions(plan=plan))
        try:
            loaded = cluster.load()
            weights = copy / "model.safetensors"
            with open(weights, "r+b") as file:
                file.truncate(weights.stat().st_size // 3)
            expected = reference_tokens(load_reference(DEMO_MODEL), PROMPT, 12)
            assert titan_tokens(loaded, PROMPT, 12) == expected
            assert cluster.dispatcher is not None
            assert cluster.dispatcher.executed.fallbacks > 0
        finally:
            cluster.close()
