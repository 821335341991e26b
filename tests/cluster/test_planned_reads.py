"""Memory for two thirds of the experts: the automatic plan has workers read the others from their own disks.

Run: .venv/bin/pytest tests/cluster/test_planned_reads.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fixtures.reference import load_reference, reference_tokens, titan_tokens
from fixtures.worker_server import wait_until

from titan.common.registry import open_checkpoint
from titan.common.slots.buffers import slot_bytes
from titan.coordinator.calibration.figures import figures_key, keep_figures
from titan.coordinator.cluster import ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.deploy import DEMO_MODEL
from titan.placement.figures import Figures, HomeFigures, WorkerFigures

PROMPT = list(range(20, 40))
HOME = HomeFigures(4e-4, 1e-5, 30e-6, 20e-6, ssd_s=20e-3, page_cache_s=20e-3, readers=1, spread=0.1)
NEAR = WorkerFigures("", 30e-6, 100e-6, None, 0.1, ssd_s=1e-3, readers=4)


def test_workers_with_quicker_disks_read_what_no_memory_holds(tmp_path: Path) -> None:
    shape = open_checkpoint(DEMO_MODEL).shape
    each_bytes = (shape.num_experts * 2 // 9) * sum(slot_bytes(spec, "float32") for spec in shape.layers)
    with LoopbackCluster(
        DEMO_MODEL,
        own_copies=True,
        home_bytes=each_bytes,
        worker_bytes=each_bytes,
        settings={"timeouts": {"execute": "4s", "readmit": "0.1s"}},
    ) as loopback:
        addresses = {worker.name: worker.address for worker in loopback.workers}
        key = figures_key(shape, "float32", {name: [address, "reads"] for name, address in addresses.items()})
        workers = {name: replace(NEAR, address=address) for name, address in addresses.items()}
        keep_figures(tmp_path, Figures(key, HOME, workers))
        phases: list[str] = []
        options = ClusterOptions(measure=True, figures_folder=tmp_path, solve_s=1.5)
        cluster = loopback.coordinator(options, report=phases.append)
        try:
            loaded = cluster.load()
            plan = cluster.plan
            assert plan is not None
            assert not [phase for phase in phases if "calibrating" in phase], "the kept figures were not used"
            absent = sum(not who for row in plan.residency for who in row)
            assert absent >= shape.num_experts * len(shape.layers) // 3
            read = [sum(map(len, plan.served_by(node))) for node in (1, 2)]
            assert all(read), "a worker's disk is not used"
            assert sum(read) > absent // 2
            assert any("from its own disk" in sentence for sentence in plan.advice)
            expected = reference_tokens(load_reference(DEMO_MODEL), PROMPT, 24)
            assert titan_tokens(loaded, PROMPT, 24) == expected
            assert cluster.dispatcher is not None
            assert cluster.dispatcher.executed.fallbacks == 0
            for link in cluster.links:
                wait_until(lambda link=link: link.demanded > 0, "reads of a worker")

            loopback._own_copies = False
            loopback.workers[0].kill()
            loopback.restart(0)  # without its copy: it holds what it is sent, and reads nothing
            first = cluster.links[0]
            assert titan_tokens(loaded, PROMPT, 24) == expected  # that it was away is seen when it is asked
            wait_until(lambda: first.has_checkpoint is False and first.ready is not None, "taking worker-1 back")
            assert first.ready is not None
            assert not any(first.ready.served.values())
            assert titan_tokens(loaded, PROMPT, 24) == expected
        finally:
            cluster.close()
