"""`titan plan` and `titan simulate` end to end. Run: pytest tests/placement/test_plan_cli.py"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from titan.common.errors import ConfigError, MemoryBudgetError, PlanError, TitanError
from titan.placement import Plan
from titan.placement.cli import register, register_bench
from titan.placement.shapes import SHAPES, find_shape
from titan.placement.synthetic import synthetic_trace
from titan.placement.trace import TraceHeader
from titan.placement.trace_file import TraceWriter

NODES = """\
coordinator: {memory: 1.6GB, compute_us: 20, ssd_us: 700, readers: 4}
workers:
  - {name: mini, memory: 1.2GB, compute_us: 30, round_trip_us: 500, bandwidth: 1GB}
  - {name: air, memory: 1.2GB, compute_us: 40, round_trip_us: 900}
"""
APP = typer.Typer()
register(APP)
BENCH = typer.Typer()
register_bench(BENCH)
APP.add_typer(BENCH, name="bench")


def run(*arguments: str | Path):
    result = CliRunner().invoke(APP, [str(a) for a in arguments])
    if isinstance(result.exception, TitanError):
        raise result.exception
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.yaml"
    path.write_text(NODES)
    return path


def test_plan_as_json_with_plan_and_picture(nodes: Path, tmp_path: Path) -> None:
    out, svg = tmp_path / "plan.json", tmp_path / "plan.svg"
    result = run("plan", "--nodes", nodes, "--shape", "olmoe", "--json", "--out", out, "--svg", svg)
    report = json.loads(result.stdout)
    assert {"predicted", "baselines", "lower_bound", "gap", "advice"} <= set(report)
    assert report["predicted"]["tokens_per_s"].keys() == {"1", "4", "8"}
    assert all(p["step_s"] >= report["predicted"]["step_s"] * (1 - 1e-9) for p in report["baselines"].values())
    assert report["gap"] < 0.1
    assert sum(n["experts"] for n in report["nodes"]) > 900
    plan = Plan.from_json(out.read_text())
    assert [n.name for n in plan.nodes] == ["coordinator", "mini", "air"]
    picture = ET.fromstring(svg.read_text())
    titles = [t.text or "" for t in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert {t.split(",")[0] for t in titles} == {f"layer {i}" for i in range(16)}
    total = sum(int(t.rsplit(" ", 1)[1]) for t in titles if t.startswith("layer 3,"))
    assert total == 64
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nodes.yaml", "plan.json", "plan.svg"]


def test_plan_for_people(nodes: Path) -> None:
    text = run("plan", "--nodes", nodes, "--shape", "OLMoE", "--zipf", "0.5").stdout
    assert "mini's link costs 500 µs a layer" in text
    assert "No placement on these nodes has a step below" in text
    assert "does not earn" in text or "without it a step takes" in text


def test_simulate_replays_a_trace_and_a_plan(nodes: Path, tmp_path: Path) -> None:
    out, trace = tmp_path / "plan.json", tmp_path / "trace"
    run("plan", "--nodes", nodes, "--shape", "olmoe", "--json", "--out", out)
    header = TraceHeader("shape:olmoe", tuple(range(16)), 64, 8)
    made = synthetic_trace(header, 60, reuse=0.4, seed=1)
    with TraceWriter(trace, header) as writer:
        for row in made.ids:
            writer.write(row[:, None, :])
    found = json.loads(run("simulate", "--trace", trace, "--plan", out, "--depths", "1,4", "--json").stdout)
    assert found["hit_rates"]["8"]["lru"] <= found["hit_rates"]["32"]["lru"] <= found["hit_rates"]["32"]["belady"]
    assert found["prefetch"]["oracle"]["4"]["stall_s"] == 0
    assert found["replay"]["steps"] == 60
    text = run("simulate", "--trace", trace, "--plan", out).stdout
    assert "hit rate of a layer's table" in text
    assert "predicted step" in text


def test_simulate_makes_a_trace_up() -> None:
    found = json.loads(
        run(
            "simulate", "--shape", "gpt-oss-20b", "--rows", "40", "--capacities", "4,16", "--depths", "1", "--json"
        ).stdout
    )
    assert list(found["hit_rates"]) == ["4", "16"]
    assert found["rows"] == 40


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NODES.replace("memory: 1.6GB", "memory: 1.6"), "memory"),
        (NODES.replace("compute_us: 20", "compute_us: -1"), "compute_us"),
        (NODES.replace("compute_us: 20", "compute_us: nan"), "compute_us: must be a finite number, not nan"),
        (NODES.replace("round_trip_us: 500", "round_trip_us: .inf"), r"nodes.yaml:\d+: .*_us: must be a finite number"),
        (NODES.replace("compute_us: 20", "compute_us: fast"), "compute_us: should be a number"),
        (NODES.replace("round_trip_us: 500", "roundtrip_us: 500"), "roundtrip_us"),
        (NODES.replace("name: air", "name: mini"), "two machines are named mini"),
        ("", "empty"),
        ("workers: []", "coordinator"),
    ],
)
def test_bad_figures_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        run("plan", "--nodes", path, "--shape", "olmoe")


def test_other_bad_input(nodes: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="deepseek_v3"):
        run("plan", "--nodes", nodes, "--shape", "gpt5")
    with pytest.raises(ConfigError, match="does not exist"):
        run("plan", "--nodes", tmp_path / "none.yaml", "--shape", "olmoe")
    with pytest.raises(MemoryBudgetError, match="need"):
        run("plan", "--nodes", nodes, "--shape", "deepseek_v3")
    with pytest.raises(ConfigError, match="cannot be written"):
        run("plan", "--nodes", nodes, "--shape", "olmoe", "--out", tmp_path / "no" / "plan.json")
    with pytest.raises(ConfigError, match="nothing to replay"):
        run("simulate")
    with pytest.raises(ConfigError, match="--capacities"):
        run("simulate", "--shape", "olmoe", "--capacities", "4")
    failed = run("plan", "--nodes", nodes, "--shape", "gpt5", "--json")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["error"]["code"] == "plan_error"


def test_bench_solver_prints_gaps_and_the_comparison() -> None:
    text = run(
        "bench", "solver", "--shapes", "olmoe", "--nodes", "2", "--skews", "0", "--links", "slow", "--seeds", "4"
    ).stdout
    assert "small instances proven by HiGHS: step at most 1.0000 of the optimum" in text
    assert "largest gap" in text


def test_bench_plan_compares_with_replays() -> None:
    rows = json.loads(
        run("bench", "plan", "--shapes", "olmoe", "--nodes", "2", "--skews", "0", "--steps", "30", "--json").stdout
    )
    assert rows[0]["replayed_ms"][0] == pytest.approx(rows[0]["predicted_ms"], rel=0.05)


@pytest.mark.parametrize(
    ("name", "megabytes", "gigabytes"),
    [
        ("olmoe", 3.54, 3.6),
        ("qwen3_30b_a3b", 2.65, 16.3),
        ("qwen3_235b_a22b", 10.62, 127.7),
        ("qwen3_next_80b", 1.77, 43.5),
        ("deepseek_v2_lite", 4.87, 8.1),
        ("deepseek_v3", 24.77, 367.8),
        ("kimi_k2", 24.77, 570.8),
        ("glm4_5_air", 9.73, 56.1),
        ("gpt_oss_20b", 13.24, 10.2),
        ("gpt_oss_120b", 13.24, 61.0),
        ("mixtral_8x7b", 99.09, 25.4),
        ("ling_mini_2", 1.77, 8.6),
        ("minimax_m2", 7.96, 126.4),
        ("llama4_scout", 70.78, 54),
        ("llama4_maverick", 70.78, 217),
        ("dots1", 9.73, 76.0),
    ],
)
def test_shapes_have_the_published_sizes(name: str, megabytes: float, gigabytes: float) -> None:
    shape = find_shape(name)
    assert shape.expert_bytes / 1e6 == pytest.approx(megabytes, rel=0.01)
    assert shape.expert_bytes * shape.num_experts * shape.moe_layers / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert set(SHAPES) >= {name}
