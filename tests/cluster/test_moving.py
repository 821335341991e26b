"""The plan changes while an answer is generated: experts move, the tokens stay.

Run: .venv/bin/pytest tests/cluster/test_moving.py
"""

from __future__ import annotations

import time
from pathlib import Path

from fixtures.plans import all_remote, make_plan
from fixtures.reference import load_reference, reference_tokens, titan_tokens

from titan.coordinator.cluster import ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.deploy import DEMO_MODEL

NODES = ("coordinator", "worker-1", "worker-2")
PROMPT = list(range(20, 40))


def test_workers_exchange_experts_while_they_execute() -> None:
    expected = reference_tokens(load_reference(DEMO_MODEL), PROMPT, 30)
    with LoopbackCluster(DEMO_MODEL, settings={"timeouts": {"execute": "1500ms"}}) as loopback:
        cluster = loopback.coordinator(ClusterOptions(plan=make_plan(loopback.checkpoint, NODES, all_remote)))
        try:
            loaded = cluster.load()
            first, second = cluster.links
            assert first.ready is not None
            before = first.ready
            even = {layer: tuple(range(0, 32, 2)) for layer in range(8)}
            odd = {layer: tuple(range(1, 32, 2)) for layer in range(8)}
            quarter = {layer: tuple(range(0, 8)) for layer in range(4)}
            for mine, theirs in ((odd, even), (quarter, odd), (even, odd)):
                first.assign(mine)
                second.assign(theirs)
                deadline = time.monotonic() + 30
                while not (first.settled and second.settled):
                    assert titan_tokens(loaded, PROMPT, 30) == expected
                    assert time.monotonic() < deadline, [link.status for link in cluster.links]
                assert first.ready is not None
                assert first.ready.held == {layer: frozenset(e) for layer, e in mine.items()}
                assert titan_tokens(loaded, PROMPT, 30) == expected
            assert first.ready.transport is before.transport, "the session was not kept"
            assert cluster.dispatcher is not None
            assert cluster.dispatcher.executed.fallbacks == 0
            assert first.times_set_aside == second.times_set_aside == 0
        finally:
            cluster.close()


def test_the_measured_plan_is_installed_and_exact(tmp_path: Path) -> None:
    expected = reference_tokens(load_reference(DEMO_MODEL), PROMPT, 20)
    with LoopbackCluster(DEMO_MODEL) as loopback:
        options = ClusterOptions(measure=True, figures_folder=tmp_path)
        cluster = loopback.coordinator(options)
        try:
            loaded = cluster.load()
            plan = cluster.plan
            assert plan is not None
            assert plan.predicted is not None
            assert plan.predicted.step_s > 0
            assert plan.advice
            assert titan_tokens(loaded, PROMPT, 20) == expected
        finally:
            cluster.close()
        # The second start finds the figures.
        kept = list(tmp_path.glob("figures-*"))
        assert len(kept) == 1
        again = loopback.coordinator(options)
        phases: list[str] = []
        again.report = phases.append
        try:
            again.load()
            assert not [p for p in phases if p.startswith("calibrating")]
            assert again.plan is not None
            assert again.plan.residency == plan.residency
        finally:
            again.close()
