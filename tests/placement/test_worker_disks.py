"""Workers that read what no memory holds: exact times, the best division of reads, bounds, plans, advice.

Run: .venv/bin/pytest tests/placement/test_worker_disks.py
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from titan.cli import app
from titan.placement import Node, Plan, Problem, solve
from titan.placement.arrangement import from_plan, memory_used
from titan.placement.bench_cases import equal_layers
from titan.placement.evaluate import MISS, Evaluator, Ints, executors
from titan.placement.predict import batch_layer
from titan.placement.routing import zipf_layers
from titan.placement.solver.disks import read_elsewhere


def problem_of(
    home: int, *workers: tuple[int, float, float], layers: int = 1, experts: int = 8, top_k: int = 2, zipf: float = 0.0
) -> Problem:
    """Workers as (experts in memory, round trip in us, an expert from disk in us)."""
    nodes = (
        Node("home", home, 20e-6, ssd_s=1e-3, readers=1),
        *(Node(f"w{i}", m, 25e-6, 4e-6, rt * 1e-6, ssd_s=d * 1e-6, readers=2) for i, (m, rt, d) in enumerate(workers)),
    )
    frequencies = zipf_layers(layers, experts, top_k, zipf, 3) if zipf else None
    return equal_layers(nodes, layers, experts, top_k, frequencies=frequencies, batch_rows=(1, 4))


def by_hand(evaluator: Evaluator, layer: int, row: Ints) -> float:
    """Every choice of the router, one after another."""
    problem, costs, total, weight = evaluator.problem, evaluator.costs, 0.0, 0.0
    for chosen in itertools.combinations(range(problem.num_experts), problem.top_k):
        chance = math.prod(evaluator.weights[layer][list(chosen)])
        codes = row[list(chosen)]
        times = []
        for n, node in enumerate(problem.nodes):
            pairs = int((executors(codes) == n).sum())
            reads = int((codes == MISS - n).sum()) if n else 0
            work = costs.base_s[n] + costs.pair_s[n] * pairs if pairs else 0.0
            times.append(work + math.ceil(reads / node.readers) * node.ssd_s)
        stall = math.ceil(int((codes == MISS).sum()) / costs.readers) * costs.ssd_s
        total += chance * (max(times) + stall)
        weight += chance
    whole = bool((row == 0).all())
    return total / weight + (0.0 if whole else problem.sync_s)


@pytest.mark.parametrize("zipf", [0.0, 0.8])
def test_times_are_those_of_all_choices(zipf: float) -> None:
    evaluator = Evaluator(problem_of(4, (4, 100, 300), (4, 50, 900), top_k=3, zipf=zipf))
    rng = np.random.default_rng(0)
    for _ in range(20):
        row = rng.choice([0, 0, 1, 2, MISS, MISS - 1, MISS - 2], 8)
        expected = by_hand(evaluator, 0, row)
        assert evaluator.layer(0, row) == pytest.approx(expected, rel=1e-9)
        assert evaluator.split(0, row).total_s == pytest.approx(expected, rel=1e-9)
        ids = evaluator.routing(0, 4000, 1, 0)
        sampled = float(batch_layer(evaluator, row, ids).mean())
        assert sampled == pytest.approx(expected, rel=0.05)


def divisions(row: Ints, codes: tuple[int, ...]) -> list[Ints]:
    missing = np.flatnonzero(row == MISS)
    out = []
    for chosen in itertools.product(codes, repeat=len(missing)):
        tried = row.copy()
        tried[missing] = chosen
        out.append(tried)
    return out


@pytest.mark.parametrize("seed", range(12))
def test_reads_are_divided_as_well_as_can_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    disks = [(8, float(rng.choice([30, 200, 600])), float(rng.choice([200, 800, 3000]))) for _ in range(2)]
    evaluator = Evaluator(problem_of(3, *disks, zipf=float(rng.choice([0.0, 0.7]))))
    place = np.array([[0, 0, 1, 2, MISS, MISS, MISS, MISS]])
    found = read_elsewhere(evaluator, place, time.monotonic() + 60)
    best = min(evaluator.layer(0, row) for row in divisions(place[0], (MISS, MISS - 1, MISS - 2)))
    assert evaluator.step(found) <= evaluator.step(place)
    assert evaluator.layer(0, found[0]) <= best * 1.01


def test_a_worker_without_room_for_a_row_does_not_read() -> None:
    evaluator = Evaluator(problem_of(3, (1, 30, 50), (2, 30, 50)))
    place = np.array([[0, 0, 1, 2, 2, MISS, MISS, MISS]])
    found = read_elsewhere(evaluator, place, time.monotonic() + 60)
    assert (found < MISS).any()
    assert not (found == MISS - 1).any()
    assert all(
        u <= node.memory_bytes
        for u, node in zip(memory_used(evaluator.problem, found), evaluator.problem.nodes, strict=True)
    )


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_is_below_every_plan_with_disks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    disk = float(rng.choice([20, 100, 700]))
    problem = problem_of(3, (2, float(rng.choice([20, 300])), disk), experts=6, zipf=float(rng.choice([0.0, 0.9])))
    plan, evaluator = solve(problem), Evaluator(problem)
    best = np.inf
    for row in itertools.product((MISS - 1, MISS, 0, 1), repeat=6):
        place = np.array([row])
        used = memory_used(problem, place)
        if (place == 0).sum() >= 2 and all(u <= n.memory_bytes for u, n in zip(used, problem.nodes, strict=True)):
            best = min(best, evaluator.step(place))
    assert plan.lower_bound_s is not None
    assert plan.predicted is not None
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    assert best <= plan.predicted.step_s * (1 + 1e-9) <= 1.25 * best


def test_a_plan_says_who_reads_what_and_comes_back_from_json() -> None:
    problem = problem_of(40, (20, 100, 400), (20, 100, 400), layers=4, experts=32, top_k=4)
    plan = solve(problem)
    plan.validate()
    assert Plan.from_json(plan.to_json()) == plan
    for worker in (1, 2):
        reads = plan.served_by(worker)
        assert sum(map(len, reads)) > 4
        assert all(plan.cache_slots(i, worker) == 4 for i, experts in enumerate(reads) if experts)
    assert any("experts a token from its own disk" in sentence for sentence in plan.advice)
    evaluator = Evaluator(problem)
    assert plan.predicted is not None
    assert evaluator.step(from_plan(plan, evaluator.weights)) <= plan.predicted.step_s * 1.02
    absent = sum(not who for row in plan.residency for who in row)
    assert sum(plan.read_by(n) + plan.kept_by(n) for n in range(3)) == absent
    assert f"{sum(plan.read_by(n) for n in range(3))} experts are in nobody's memory and read from SSDs" in " ".join(
        plan.advice
    )
    nodes = tuple(replace(node, ssd_s=0.0) if n else node for n, node in enumerate(problem.nodes))
    without = solve(replace(problem, nodes=nodes))
    assert without.reads == ()
    alone = solve(replace(problem, nodes=(*nodes[:2], replace(nodes[2], memory_bytes=0))))
    assert alone.predicted is not None
    said = next(re.search(r"^w1.*without it a step takes ([\d.]+) ms", s) for s in plan.advice if s.startswith("w1"))
    assert said is not None
    assert 1e-3 * float(said[1]) < 0.95 * alone.predicted.step_s, "the other worker reads when this one is not there"
    assert without.predicted is not None
    assert plan.predicted.step_s < 0.9 * without.predicted.step_s
    slow = tuple(replace(node, ssd_s=50e-3) if n else node for n, node in enumerate(problem.nodes))
    assert solve(replace(problem, nodes=slow)).reads == (), "a disk that is no gain is left alone"


def test_nodes_yaml_plans_with_workers_disks(tmp_path: Path) -> None:
    text = """
coordinator: {name: studio, memory: 2GiB, compute_us: 70, ssd_us: 900}
workers:
  - {name: mini, memory: 512MiB, compute_us: 90, round_trip_us: 200, ssd_us: 900, readers: 2}
"""
    (tmp_path / "nodes.yaml").write_text(text)
    arguments = ["plan", "--nodes", str(tmp_path / "nodes.yaml"), "--shape", "olmoe", "--time-limit", "3", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["nodes"][1]["reads_experts"] > 0
    assert any("mini reads" in sentence for sentence in report["advice"])
    assert report["lower_bound"] <= report["predicted"]["step_s"] < report["baselines"]["one_node"]["step_s"]
