"""From figures to the problem that the solver is given.

Run: .venv/bin/pytest tests/coordinator/calibration/test_planning.py
"""

from __future__ import annotations

from dataclasses import replace

from titan.common.config.hosts import HostsConfig
from titan.common.registry import open_checkpoint
from titan.coordinator.planning import make_problem, with_caches
from titan.deploy import DEMO_MODEL
from titan.placement import Node, Plan
from titan.placement.figures import Figures, HomeFigures, WorkerFigures

HOME = HomeFigures(4e-4, 1e-5, 3e-5, 2e-5, 150e-6, 40e-6, 4, 0.1, choice_s=5e-6, power_w=20.0)
FAST = WorkerFigures("10.0.0.2:7077", 2e-5, 3e-4, 1e9, 0.05, transport="lane", power_w=30.0)
SLOW = replace(FAST, address="10.0.1.2:7077", round_trip_s=4e-3, bandwidth_bytes_s=1e7)
FIGURES = Figures("k", HOME, {"mini": FAST}, {"mini": (SLOW,)}, {"mini": ("10.0.2.2:7077",)})
HOSTS = HostsConfig.model_validate(
    {"model": str(DEMO_MODEL), "workers": [{"name": "mini", "addresses": [FAST.address, SLOW.address]}]}
)


def test_the_address_in_use_is_planned_with_its_own_figures() -> None:
    shape = open_checkpoint(DEMO_MODEL).shape
    for figures in (FAST, SLOW):
        problem = make_problem(shape, HOSTS, "float32", 1 << 30, {"mini": 1 << 30}, {"mini": figures.address}, FIGURES)
        node = problem.nodes[1]
        assert (node.address, node.round_trip_s) == (figures.address, figures.round_trip_s)
        assert node.bandwidth_bytes_s == figures.bandwidth_bytes_s
        assert (node.power_w, problem.nodes[0].power_w) == (30.0, 20.0)
        assert problem.activation_bytes == 4 * shape.hidden_size, "bandwidth counts only with the bytes of a row"
        assert problem.sync_s == HOME.sync_s + HOME.choice_s
        assert node.address_why is not None
        other = SLOW if figures is FAST else FAST
        assert f"{other.address} takes" in node.address_why
        assert "10.0.2.2:7077 did not answer" in node.address_why


def test_reads_cost_what_their_tier_costs() -> None:
    shape = open_checkpoint(DEMO_MODEL).shape
    for cached, seconds in ((False, HOME.ssd_s), (True, HOME.page_cache_s)):
        problem = make_problem(shape, HOSTS, "float32", 1 << 30, {}, {}, FIGURES, cached=cached)
        assert problem.nodes[0].ssd_s == seconds


def test_a_worker_that_reads_has_its_own_lambda() -> None:
    shape = open_checkpoint(DEMO_MODEL).shape
    disk = replace(FAST, ssd_s=2e-3, readers=3)
    figures = replace(FIGURES, workers={"mini": disk})

    def node(disks: dict[str, float | None], caches: dict[str, int] | None = None, known: Figures = figures) -> Node:
        there = {"mini": disk.address}
        memory = {"mini": 1 << 30}
        return make_problem(shape, HOSTS, "float32", 1 << 30, memory, there, known, caches=caches, disks=disks).nodes[1]

    assert (node({"mini": None}).ssd_s, node({"mini": None}).readers) == (2e-3, 3)
    assert node({"mini": 1e-3}).ssd_s == 2e-3, "a share of reads at once is no shorter read"
    assert node({"mini": 7e-3}).ssd_s == 7e-3, "serving told of slower reads than were measured"
    assert node({}).ssd_s == 0, "it has nothing to read from now"
    assert node({"mini": None}, {"mini": 4}).ssd_s == 0, "hosts.yaml says what its slots are for"
    assert node({"mini": None}, known=FIGURES).ssd_s == 0, "nothing is known of its disk"


def test_slots_of_hosts_yaml_stand_beside_planned_reads() -> None:
    nodes = (Node("home", 100, 1e-5), Node("hand", 4, 1e-5), Node("planned", 4, 1e-5))
    reads = ((0, 0, 0, 0, 0, 2, 2, 2),)
    slots = ((2,), (0,), (2,))
    plan = Plan("f", 8, 2, (0,), (1,), nodes, (((),) * 8,), slots, reads=reads)
    found = with_caches(plan, {"hand": 2}, {"hand": 6})
    assert found.slots == ((2,), (2,), (2,))
    assert found.served_by(2)[0] == (5, 6, 7), "what was planned stays"
    assert {*found.served_by(0)[0], *found.served_by(1)[0]} == {0, 1, 2, 3, 4}
    assert len(found.served_by(1)[0]) in (2, 3)
    assert found.nodes[1].memory_bytes == 6
    assert with_caches(plan, {}, {}) is plan
