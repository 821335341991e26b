"""What the coordinator says of its workers and of where a layer's time goes, over two real ones.

Run: .venv/bin/pytest tests/cluster/test_metrics.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from fixtures.reference import load_reference, reference_tokens, titan_tokens

from titan.common.metrics import CollectorRegistry, Figures, metrics_text
from titan.coordinator.bench.placement import on_workers
from titan.coordinator.cluster import ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.describe import describe_cluster
from titan.coordinator.metrics import cluster_samples
from titan.coordinator.moe.layer_times import FIRST
from titan.deploy import DEMO_MODEL

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/titan.json"
PROMPT = [3, 4, 5]
TOKENS = FIRST + 2


def test_time_bytes_and_breakers_of_workers() -> None:
    with LoopbackCluster(DEMO_MODEL, settings={"timeouts": {"execute": "10s"}}) as loopback:
        names = (loopback.hosts.coordinator.name, *(worker.name for worker in loopback.hosts.workers))
        cluster = loopback.coordinator(ClusterOptions(plan=on_workers(loopback.checkpoint, names)))
        try:
            tokens = titan_tokens(cluster.load(), PROMPT, TOKENS)
            registry = CollectorRegistry()
            registry.register(Figures(lambda: cluster_samples(cluster)))
            text = metrics_text(registry).decode()
            described = json.loads(json.dumps(describe_cluster(cluster)))
        finally:
            cluster.close()
    assert tokens == reference_tokens(load_reference(DEMO_MODEL), PROMPT, TOKENS)
    assert len(described["layers"]) == 8
    for layer in described["layers"]:
        assert layer["passes"] == 1
        assert min(layer[f"{part}_us"] for part in ("attention", "wire", "local")) > 0
    for worker in described["workers"]:
        traffic = worker["traffic"]
        assert worker["breaker"] == "closed"
        assert traffic["calls"] > 8 * FIRST
        assert traffic["received_bytes"] > traffic["sent_bytes"] > traffic["calls"]
        assert traffic["wire_s"] > 0 < traffic["compute_s"]
    assert 'titan_worker_breaker_state{state="closed",worker="worker-1"} 1.0' in text
    asked = re.findall(
        r"titan_(?:layer|remote|worker_breaker|worker_(?:offered|assigned))_[a-z_]+", DASHBOARD.read_text()
    )
    assert len(set(asked)) >= 8
    missing = {name for name in asked if not re.search(rf"^{name}\{{", text, re.MULTILINE)}
    assert not missing - {"titan_remote_wait_seconds_total"}
