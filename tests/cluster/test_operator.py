"""`titan calibrate` and `titan plan` on a real cluster, and the plan they wrote in use.

Run: .venv/bin/pytest tests/cluster/test_operator.py
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from fixtures.processes import CoordinatorProcess, run_titan, write_hosts

from titan.coordinator.demo.cluster import LoopbackCluster
from titan.deploy import DEMO_MODEL
from titan.placement import Plan


def test_measure_plan_and_serve_the_plan(tmp_path: Path) -> None:
    home = str(tmp_path)
    with LoopbackCluster(DEMO_MODEL, own_copies=True) as loopback:
        hosts = str(write_hosts(loopback.folder / "hosts.yaml", loopback.hosts))
        measured = run_titan("calibrate", "--hosts", hosts, "--json", HOME=home)
        assert measured.returncode == 0, measured.stderr
        figures = json.loads(measured.stdout)
        assert set(figures["workers"]) == {"worker-1", "worker-2"}
        assert figures["home"]["attention_s"] > 0
        assert figures["workers"]["worker-1"]["round_trip_s"] > 0
        assert figures["memory_bytes"]["worker-1"] > 0
        assert figures["not_measured"] == {}
        assert all(worker["ssd_s"] > 0 for worker in figures["workers"].values())
        assert all(1 <= worker["readers"] <= 4 for worker in figures["workers"].values())

        out, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
        planned = run_titan(
            "plan", "--hosts", hosts, "--json", "--out", str(out), "--svg", str(picture), "--time-limit", "3", HOME=home
        )
        assert planned.returncode == 0, planned.stderr
        report = json.loads(planned.stdout)
        assert {"predicted", "baselines", "lower_bound", "gap", "advice"} <= set(report)
        plan = Plan.from_json(out.read_text())
        assert [node.name for node in plan.nodes] == ["coordinator", "worker-1", "worker-2"]
        assert [node.ssd_s for node in plan.nodes[1:]] == [w["ssd_s"] for w in figures["workers"].values()]
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")

        with CoordinatorProcess(Path(hosts), "--plan", str(out)) as coordinator:
            url = coordinator.wait_until_ready()
            request = urllib.request.Request(f"{url}/titan/replan", b"", method="POST")
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=30)
            assert refused.value.code == 409
            assert "not planned from measured figures" in refused.value.read().decode()
            assert coordinator.stop() == 0


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    assert run_titan("plan").returncode == 2
    both = run_titan("plan", "--hosts", "a.yaml", "--nodes", "b.yaml")
    assert both.returncode == 2
    assert "--hosts or --nodes" in both.stderr
    missing = run_titan("plan", "--hosts", str(tmp_path / "none.yaml"), "--json")
    assert missing.returncode == 2
    assert "does not exist" in json.loads(missing.stdout)["error"]["message"]

    (tmp_path / "hosts.yaml").write_text(f"model: {DEMO_MODEL}\n")
    other = tmp_path / "plan.json"
    other.write_text('{"version": 99}')
    with CoordinatorProcess(tmp_path / "hosts.yaml", "--plan", str(other)) as coordinator:
        assert coordinator.process.wait(60) == 1
        coordinator.stop()
        assert "version 99" in coordinator.words()
