"""Workers sent more experts than they have memory for: read from their disks, the same tokens; files that go bad.

Run: .venv/bin/pytest tests/cluster/test_kept.py
"""

from __future__ import annotations

import numpy as np
from fixtures.plans import make_plan
from fixtures.reference import load_reference, logits_of, reference_logits, reference_tokens, titan_tokens
from fixtures.worker_server import wait_until

from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.deploy import DEMO_MODEL
from titan.placement import Plan

NODES = ("coordinator", "worker-1", "worker-2")
PATIENT = {"timeouts": {"execute": "2s"}}
PROMPT = list(range(20, 40))


def some_held(layer: int, expert: int) -> tuple[int, ...]:
    return ((0,), (1,), (), (), (2,), (), ())[(expert + layer) % 7]


def served(cluster: Cluster) -> int:
    ready = [link.ready for link in cluster.links]
    return sum(len(experts) for r in ready if r is not None for experts in r.served.values())


def wanted(plan: Plan) -> int:
    return sum(len(experts) for node in (1, 2) for experts in plan.served_by(node))


def sent_bytes(loopback: LoopbackCluster) -> int:
    """Size of all files that the workers keep."""
    folders = [loopback.kept_by(worker.name) for worker in loopback.workers]
    return sum(path.stat().st_size for folder in folders for path in folder.glob("*/*.safetensors"))


def test_kept_experts_are_served_from_disk_and_bad_files_are_sent_again() -> None:
    reference = load_reference(DEMO_MODEL)
    expected = reference_tokens(reference, PROMPT, 24)
    with LoopbackCluster(DEMO_MODEL, kept="1GiB", settings=PATIENT) as loopback:
        plan = make_plan(loopback.checkpoint, NODES, some_held, worker_slots=3)
        cluster = loopback.coordinator(ClusterOptions(plan=plan))
        try:
            loaded = cluster.load()
            assert cluster.dispatcher is not None
            assert served(cluster) == wanted(plan) > 0
            for link in cluster.links:
                progress = link.status.progress
                assert progress is not None
                assert progress.bytes_done == progress.bytes_total > 0
            assert titan_tokens(loaded, PROMPT, 24) == expected
            batch = [np.random.default_rng(seed).integers(3, 2000, 70).tolist() for seed in (2, 3)]
            found = logits_of(loaded.model, loaded.make_cache(), batch, steps=2)
            for want, have in zip(reference_logits(reference, batch, steps=2), found, strict=True):
                np.testing.assert_array_equal(have, want)
            assert cluster.dispatcher.executed.fallbacks == 0

            files = sorted(loopback.kept_by("worker-1").glob("*/*.safetensors"))
            names = {(f"{plan.layers[i]:05d}-{e:05d}") for i, row in enumerate(plan.served_by(1)) for e in row}
            mine = [path for path in files if path.name[:11] in names]
            assert len(mine) == len(names)
            for number, path in enumerate(mine):
                if number % 2:
                    path.unlink()
                else:
                    path.write_bytes(path.read_bytes()[:-4096])
            assert titan_tokens(loaded, PROMPT, 24) == expected
            assert cluster.dispatcher.executed.fallbacks > 0
            link = cluster.links[0]
            wait_until(lambda: link.ready is not None and link.settled, "the worker's use of what it was sent again")
            assert link.times_set_aside == 0, "the whole worker was set aside for the sake of a file"
            assert titan_tokens(loaded, PROMPT, 24) == expected
        finally:
            cluster.close()

        again = loopback.coordinator(ClusterOptions(plan=plan))
        try:
            loaded = again.load()
            assert titan_tokens(loaded, PROMPT, 8) == expected[:8]
        finally:
            again.close()


def test_a_small_disk_serves_what_fits() -> None:
    with LoopbackCluster(DEMO_MODEL, kept="600KiB", settings=PATIENT) as loopback:
        plan = make_plan(loopback.checkpoint, NODES, some_held, worker_slots=3)
        cluster = loopback.coordinator(ClusterOptions(plan=plan))
        try:
            loaded = cluster.load()
            assert 0 < served(cluster) < wanted(plan)
            counts = [len(r.served.get(i, ())) for link in cluster.links for i in plan.layers if (r := link.ready)]
            assert max(counts) - min(counts) <= 1, "no layer goes without"
            assert sent_bytes(loopback) <= 2 * 600 * 1024
            assert titan_tokens(loaded, PROMPT, 12) == reference_tokens(load_reference(DEMO_MODEL), PROMPT, 12)
            assert cluster.dispatcher is not None
            assert cluster.dispatcher.executed.fallbacks == 0
        finally:
            cluster.close()
