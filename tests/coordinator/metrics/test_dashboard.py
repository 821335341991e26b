"""The dashboard asks for figures that exist, on a real model. Run: `.venv/bin/pytest tests/coordinator/metrics`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from fixtures.generation import DEADLINE_S, wait_until
from prometheus_client.parser import text_string_to_metric_families

from titan.common.config.hosts import HostsConfig
from titan.common.metrics import CollectorRegistry, Figures, metrics_text
from titan.common.registry import open_checkpoint
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.describe import describe_cluster
from titan.coordinator.generation import Engine, GenerationRequest, Sampling
from titan.coordinator.metrics import RequestMetrics, cluster_samples, engine_samples
from titan.coordinator.moe.layer_times import FIRST
from titan.deploy import DEMO_MODEL

DASHBOARD = Path(__file__).parents[3] / "deploy/grafana/titan.json"
# tests/cluster/test_worker_metrics.py and test_metrics.py look for those
NEEDS_WORKERS = re.compile(r"titan_worker_|titan_remote_(calls|sent|received|seconds)")


def test_every_figure_of_the_dashboard_is_there(tmp_path: Path) -> None:
    hosts = HostsConfig.model_validate({"model": str(DEMO_MODEL), "coordinator": {"memory": 4 << 20}})
    options = ClusterOptions(prompt_cache_bytes=8 << 20, prompt_cache_folder=tmp_path, prefetch="auto")
    cluster = Cluster(hosts, open_checkpoint(DEMO_MODEL), None, options)
    registry = CollectorRegistry()
    engine = Engine(cluster.load, observer=RequestMetrics(registry))
    registry.register(Figures(lambda: engine_samples(engine), lambda: cluster_samples(cluster)))
    assert describe_cluster(cluster)["executed"] is None
    engine.start()
    try:
        wait_until(lambda: engine.status().state == "ready", "the model to load")
        asyncio.run(_ask(engine))
        text = metrics_text(registry).decode()
        described = json.loads(json.dumps(describe_cluster(cluster)))
    finally:
        assert engine.stop(DEADLINE_S)
    samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    asked = {name for name in re.findall(r"titan_[a-z_]+", DASHBOARD.read_text()) if not NEEDS_WORKERS.match(name)}
    assert asked <= set(samples), asked - set(samples)
    assert samples["titan_slot_misses_total"] >= 0
    assert samples["titan_store_read_bytes_total"] > 0
    executed = described["executed"]
    assert executed["local"] + executed["ssd"] > 0
    assert described["prompt_cache"]["prompt_tokens"] == 80
    assert described["plan"]["layers"] == 8
    assert [layer["passes"] for layer in described["layers"]] == [1] * 8
    assert described["memory"]["slots_bytes"] <= described["memory"]["experts_budget_bytes"]
    assert 0 <= samples["titan_prefetch_recall_ratio"] <= 1


async def _ask(engine: Engine) -> None:
    handle = engine.submit(GenerationRequest(tuple(range(1, 81)), FIRST + 4, Sampling(temperature=0), ignore_end=True))
    async for _ in handle:
        pass
