"""Metrics, cluster, drain, named keys. Run: `.venv/bin/pytest tests/coordinator/api/test_operations.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.api_server import RunningApi
from fixtures.generation import PROMPTS, ProbedEngine
from prometheus_client.parser import text_string_to_metric_families

from titan.common.errors import ConfigError
from titan.common.metrics import CollectorRegistry, Figures, metrics_text
from titan.coordinator.api import Operations
from titan.coordinator.api.keyfile import add_key, read_keys
from titan.coordinator.metrics import RequestMetrics, engine_samples

BODY: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def watched() -> Iterator[RunningApi]:
    registry = CollectorRegistry()
    with ProbedEngine(observer=RequestMetrics(registry)) as probed:
        registry.register(Figures(lambda: engine_samples(probed.engine)))
        operations = Operations(lambda: metrics_text(registry), lambda: {"model": {"name": "demo"}})
        with RunningApi(probed, operations=operations) as api:
            yield api


def figures(api: RunningApi) -> dict[str, float]:
    response = api.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "le")
            if "le" not in sample.labels:
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_metrics_count_requests_and_tokens(watched: RunningApi) -> None:
    before = figures(watched)
    usage = [watched.http.post("/v1/completions", json=BODY).json()["usage"] for _ in range(2)]
    after = figures(watched)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("titan_requests_total{outcome=completed}") == 2
    assert grown("titan_generated_tokens_total") == sum(u["completion_tokens"] for u in usage)
    assert grown("titan_prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage)
    assert grown("titan_time_to_first_token_seconds_count") == 2
    assert grown("titan_time_between_tokens_seconds_count") == sum(u["completion_tokens"] - 1 for u in usage)
    assert after["titan_engine_state{state=ready}"] == 1
    assert after["titan_requests_queued"] == 0
    for family in text_string_to_metric_families(watched.http.get("/metrics").text):
        assert re.fullmatch(r"titan_[a-z_]+", family.name)
        assert family.documentation


def test_cluster_drain_and_resume(watched: RunningApi) -> None:
    state = watched.http.get("/v1/titan/cluster").json()
    assert (state["engine"]["state"], state["model"]) == ("ready", {"name": "demo"})
    assert watched.http.post("/v1/titan/drain").json()["engine"]["state"] == "draining"
    assert watched.http.get("/ready").json()["state"] == "draining"
    refused = watched.http.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_not_ready")
    assert watched.http.post("/v1/titan/resume").json()["engine"]["state"] == "ready"
    assert watched.http.post("/v1/completions", json=BODY).status_code == 200


def test_named_keys_are_digests_with_roles_and_limits(probed: ProbedEngine, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    ann = add_key(path, "ann", operator=False, requests_per_minute=3)
    boss = add_key(path, "boss", operator=True, requests_per_minute=None)
    assert ann not in path.read_text()
    assert boss not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="has a key 'ann' already"):
        add_key(path, "ann", operator=False, requests_per_minute=None)
    with pytest.raises(ConfigError, match="is no name"):
        add_key(path, "a b", operator=False, requests_per_minute=None)
    with RunningApi(probed, api_keys=read_keys(path)) as api:

        def get(method: str, where: str, key: str) -> Any:
            return api.http.request(method, where, headers={"Authorization": f"Bearer {key}"})

        assert api.http.get("/metrics").status_code == 401
        assert get("POST", "/v1/titan/drain", ann).status_code == 403
        assert get("POST", "/v1/titan/resume", boss).status_code == 200
        assert api.http.get("/v1/models", headers={"x-api-key": ann}).status_code == 200
        assert get("GET", "/metrics", ann).status_code == 200
        limited = get("GET", "/v1/models", ann)
        assert (limited.status_code, limited.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(limited.headers["retry-after"]) >= 1
        assert get("GET", "/v1/models", boss).status_code == 200


def test_key_files_that_are_wrong_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, "ann", operator=False, requests_per_minute=None)
    path.write_text(path.read_text() + "bob king sha256:" + "0" * 64 + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_keys(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        read_keys(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")
    plain = tmp_path / "plain"
    plain.write_text("a-key-of-sixteen-characters\n")
    plain.chmod(0o600)
    assert read_keys(plain).check(b"Bearer a-key-of-sixteen-characters").operator
