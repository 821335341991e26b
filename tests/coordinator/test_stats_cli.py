"""`titan stats` against a coordinator that runs as a process of its own.

Run: .venv/bin/pytest tests/coordinator/test_stats_cli.py
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from fixtures.plans import all_ssd, make_plan
from fixtures.processes import CoordinatorProcess, run_titan, write_hosts

from titan.common.config.hosts import HostsConfig
from titan.common.registry import open_checkpoint
from titan.coordinator.client import base_of
from titan.deploy import DEMO_MODEL

SLOTS = 8


def hosts_and_plan(path: Path) -> tuple[Path, Path]:
    settings = {"model": str(DEMO_MODEL), "coordinator": {"listen": "127.0.0.1:0"}}
    config = HostsConfig.model_validate(settings)
    plan = path / "plan.json"
    plan.write_text(make_plan(open_checkpoint(DEMO_MODEL), (config.coordinator.name,), all_ssd, SLOTS).to_json())
    return write_hosts(path / "hosts.yaml", config), plan


def complete(url: str) -> None:
    body = json.dumps(
        {"model": DEMO_MODEL.name, "prompt": "Who art thou?", "max_tokens": 24, "temperature": 0}
    ).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert reply.status == 200


def test_stats_of_a_coordinator_that_reads_from_its_disk(tmp_path: Path) -> None:
    hosts, plan = hosts_and_plan(tmp_path)
    options = ("--plan", str(plan), "--prefetch", "auto", "--policy", "forecast", "--prompt-cache-disk", "0B")
    with CoordinatorProcess(hosts, *options) as coordinator:
        url = coordinator.wait_until_ready()
        base = url.removesuffix("/v1")
        empty = run_titan("stats", "--url", base)
        assert empty.returncode == 0
        assert empty.stdout.startswith("Nothing to show yet")

        complete(url)
        found = json.loads(run_titan("stats", "--url", base, "--json").stdout)
        layers, total = found["layers"], found["total"]
        assert [layer["layer"] for layer in layers] == list(range(8))
        for layer in layers:
            assert layer["slots"] == SLOTS
            assert 0 < layer["hit_rate"] < 1
            assert layer["misses"] > 0
            assert layer["loads"] >= layer["misses"] - SLOTS
            assert layer["bytes"] > 0
            assert layer["stall_s"] > 0
        for key in ("hits", "misses", "loads", "bytes", "prefetched"):
            assert total[key] == sum(layer[key] for layer in layers)
        assert found["disk"]["bytes"] >= total["bytes"], "what loading read is read, too"
        assert found["disk"]["bytes_per_s"] > 0
        assert (found["policy"], found["prefetch"], found["workers"]) == ("forecast", "auto", [])

        shown = run_titan("stats", "--url", base, COLUMNS="100").stdout
        assert "policy forecast" in shown
        assert all(len(line) <= 100 for line in shown.splitlines())
        (totals,) = [line for line in shown.splitlines() if line.split()[1:2] == ["all"]]
        assert f"{total['hit_rate']:.1%}" in totals
        assert str(total["loads"]) in totals
        assert "disk: " in shown


def test_a_coordinator_that_is_not_there_is_named() -> None:
    failed = run_titan("stats", "--url", "http://127.0.0.1:9")
    assert failed.returncode != 0
    assert "127.0.0.1:9" in failed.stdout + failed.stderr


def test_what_people_paste_as_the_coordinators_address() -> None:
    for text in ("desk:8080", "http://desk:8080", "http://desk:8080/", "http://desk:8080/v1", "desk:8080/v1/"):
        assert base_of(text) == "http://desk:8080"
    assert base_of("https://desk/v1") == "https://desk"
