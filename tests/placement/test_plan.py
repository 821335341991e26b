"""Run: pytest tests/placement/test_plan.py"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from titan.common.errors import MemoryBudgetError, PlanError, PlanVersionError, PlanViolation
from titan.placement import Node, Plan, Problem, solve


def make_problem(home: int = 40, workers: tuple[int, ...] = (30, 60), layers: int = 4, experts: int = 16) -> Problem:
    nodes = (
        Node("home", home * 10, 2e-5, ssd_s=4e-4),
        *(Node(f"w{i}", m * 10, 2e-5, round_trip_s=5e-4) for i, m in enumerate(workers)),
    )
    return Problem(
        fingerprint="f" * 64,
        layers=tuple(range(1, layers + 1)),
        expert_bytes=(10,) * layers,
        num_experts=experts,
        top_k=4,
        attention_s=(1e-4,) * layers,
        nodes=nodes,
    )


def plan_of(**kwargs) -> Plan:
    return solve(make_problem(**kwargs), method="proportional")


def test_proportional_fills_whole_layers_first_then_workers_by_memory() -> None:
    plan = plan_of()
    assert plan.is_whole(0)
    assert plan.is_whole(1)
    assert not plan.is_whole(2)
    assert plan.slots[0] == (16, 16, 4, 4)
    on_workers = [sum(len(row) for row in plan.held_by(n)) for n in (1, 2)]
    assert sum(on_workers) == 32
    assert on_workers[1] == pytest.approx(2 * on_workers[0], abs=2)


def test_what_no_memory_holds_is_left_to_the_ssd() -> None:
    plan = plan_of(home=16, workers=(5,))
    assert sum(not holders for row in plan.residency for holders in row) == 4 * 16 - 5
    assert plan.cache_slots(3) == 4


def test_round_trip_through_json() -> None:
    plan = plan_of()
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.position(3) == 2
    with pytest.raises(KeyError):
        plan.position(0)


def test_home_without_top_k_slots_is_refused_with_the_bytes_needed() -> None:
    with pytest.raises(MemoryBudgetError, match="160"):
        plan_of(home=15)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 99}, "version 99"),
        ({"version": None}, "version None"),
    ],
)
def test_other_versions_are_refused(change: dict, says: str) -> None:
    raw = json.loads(plan_of().to_json()) | change
    with pytest.raises(PlanVersionError, match=says):
        Plan.from_json(json.dumps(raw))


def _set(raw: dict, path: tuple, value: object) -> dict:
    at = raw
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return raw


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("nodes", 1, "compute_s"), -1.0, "compute_s of node w0"),
        (("nodes", 1, "compute_s"), "fast", "compute_s of node w0"),
        (("nodes", 1, "memory_bytes"), 50, "mem"),
        (("nodes", 1, "name"), "home", "same name"),
        (("residency", 2, 3), [7], "holder of expert 3"),
        (("residency", 2, 3), [-1], "holder of expert 3"),
        (("residency", 2, 3), [1, 1], "holders"),
        (("residency", 2, 3), [True], "holder of expert 3"),
        (("residency", 2), [], "exec"),
        (("slots", 0, 2), 3, "res"),
        (("slots", 0, 2), 17, "slots"),
        (("slots", 1, 2), 0, "res"),
        (("layers", 0), 2, "ascending"),
        (("top_k",), 17, "top_k"),
        (("extra",), 1, "unknown fields"),
        (("residency",), 5, "cannot be read"),
    ],
)
def test_violations_are_named(path: tuple, value: object, says: str) -> None:
    raw = _set(json.loads(plan_of().to_json()), path, value)
    with pytest.raises(PlanViolation, match=says):
        Plan.from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1}', "NaN", "[" * 100_000])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)


def test_nan_is_refused() -> None:
    text = plan_of().to_json().replace('"round_trip_s":0.0005', '"round_trip_s":NaN')
    with pytest.raises(PlanViolation, match="NaN"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_s": (float("nan"),) * 4},
        {"sync_s": -1.0},
        {"top_k": 0},
        {"top_k": 17},
        {"layers": ()},
        {"expert_bytes": (10, 10, 10)},
        {"frequencies": ((0.25,) * 16,) * 3},
        {"frequencies": ((0.5,) * 16,) * 4},
        {"nodes": ()},
        {"batch_rows": (0,)},
    ],
)
def test_bad_problems_are_refused(change: dict) -> None:
    with pytest.raises(PlanViolation):
        solve(replace(make_problem(), **change), method="proportional")


def test_unknown_method_is_refused() -> None:
    with pytest.raises(PlanError, match="proportional"):
        solve(make_problem(), method="magic")
