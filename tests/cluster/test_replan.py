"""Planning again while answers are generated.

Run: .venv/bin/pytest tests/cluster/test_replan.py
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest
from fixtures.reference import load_reference, reference_tokens

from titan.common.errors import PlanError
from titan.coordinator.cluster import ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.demo.run import wait_until_ready
from titan.coordinator.generation.engine import Engine
from titan.coordinator.generation.events import TextDelta
from titan.coordinator.generation.request import GenerationRequest, Sampling
from titan.coordinator.replan import Replanner, corrected, drifted, reached_at, readdressed
from titan.deploy import DEMO_MODEL
from titan.placement import Node, Plan
from titan.placement.figures import Figures, HomeFigures, WorkerFigures
from titan.placement.routing import zipf_layers

HOME = HomeFigures(4e-4, 1e-5, 30e-6, 20e-6, ssd_s=20e-3, page_cache_s=20e-3, readers=1, spread=0.1)
NEAR = WorkerFigures("a:1", 30e-6, 100e-6, None, 0.1)
FAR = WorkerFigures("b:1", 30e-6, 400e-3, None, 0.1)
PROMPT = (43, 459, 961, 344, 296, 411, 270, 857, 327, 326)


def test_drift_is_what_leaves_the_band() -> None:
    figures = Figures("k", HOME, {"one": NEAR, "two": FAR})
    planned = NEAR.round_trip_s + 3 * NEAR.compute_s
    assert drifted(figures, {"one": (3, planned * 1.4), "other": (3, 1.0)}) == {}
    found = drifted(figures, {"one": (3, planned * 4)})
    assert found == {"one": pytest.approx(4)}
    better = corrected(figures, found)
    assert better.workers["one"].round_trip_s == pytest.approx(4 * NEAR.round_trip_s)
    assert better.workers["two"] == FAR
    assert drifted(better, {"one": (3, planned * 4)}) == {}


def test_a_worker_at_another_address_has_that_ones_figures() -> None:
    slow = replace(NEAR, address="a:2", round_trip_s=5e-3)
    figures = Figures("k", HOME, {"one": NEAR, "two": FAR}, {"one": (slow,)})
    nodes = (Node("home", 1, 0.0), Node("one", 1, 0.0, address="a:1"), Node("two", 1, 0.0, address="b:1"))
    plan = Plan("f", 1, 1, (0,), (1,), nodes, (((0,),),), ((1,), (0,), (0,)))
    assert readdressed(figures, plan, {"one": "a:1", "two": "b:1"}) == {}
    assert readdressed(figures, plan, {"one": "a:9", "two": ""}) == {}, "nothing is known of that address"
    moved = readdressed(figures, plan, {"one": "a:2", "two": "b:1"})
    assert moved == {"one": "a:2"}
    there = reached_at(figures, moved)
    assert (there.workers["one"], there.elsewhere["one"]) == (slow, (NEAR,))
    assert there.workers["two"] == FAR
    assert there.why_address("one", "a:2", 2, 1024) is not None


async def test_experts_move_while_answers_go_on() -> None:
    expected = reference_tokens(load_reference(DEMO_MODEL), list(PROMPT), 40)
    assert 0 not in expected, "the answer ends by itself: take another prompt"
    with LoopbackCluster(DEMO_MODEL, settings={"timeouts": {"execute": "4s"}}) as loopback:
        cluster = loopback.coordinator(ClusterOptions())
        engine = Engine(cluster.load)
        engine.start()
        try:
            await wait_until_ready(engine, lambda _phase: None)
            first = cluster.plan
            assert first is not None
            replanner = Replanner(cluster, engine.run_between_steps)
            figures = Figures("k", HOME, {"worker-1": NEAR, "worker-2": FAR})

            async def answer() -> list[int]:
                tokens: list[int] = []
                async for event in engine.submit(GenerationRequest(PROMPT, 40, Sampling(temperature=0))):
                    if isinstance(event, TextDelta):
                        tokens += event.tokens
                return tokens

            async def answer_until(done: asyncio.Future) -> int:
                count = 0
                while not done.done() or count == 0:
                    assert await answer() == expected
                    count += 1
                return count

            cluster.figures = figures
            move = asyncio.get_running_loop().run_in_executor(None, replanner.replan)
            await answer_until(move)
            plan = await move
            assert plan is not None, "a plan made without figures was as good as one for these"
            assert plan.residency != first.residency
            assert cluster.plan is plan
            assert not any(2 in holders for row in plan.residency for holders in row), "the far worker was used"
            await asyncio.to_thread(cluster.workers.wait)
            assert await answer() == expected
            for position, layer in enumerate(plan.layers):
                assert cluster.layers[layer].table.capacity == plan.slots[0][position]

            # The same figures again bring nothing: nothing moves.
            assert await asyncio.to_thread(replanner.replan) is None
            # The near worker has become the far one.
            swapped = replace(figures, workers={"worker-1": FAR, "worker-2": NEAR})
            second = await asyncio.to_thread(lambda: replanner.replan(swapped))
            assert second is not None
            assert await answer() == expected
            cluster.figures = swapped
            assert (await asyncio.to_thread(replanner.on_request))["moved"] is False
            assert cluster.dispatcher is not None
            assert cluster.dispatcher.executed.fallbacks == 0
        finally:
            assert await asyncio.to_thread(engine.stop, 30)


async def test_text_of_another_kind_brings_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference_tokens(load_reference(DEMO_MODEL), list(PROMPT), 40)
    with LoopbackCluster(DEMO_MODEL, settings={"timeouts": {"execute": "4s"}}) as loopback:
        cluster = loopback.coordinator(ClusterOptions())
        engine = Engine(cluster.load)
        engine.start()
        try:
            await wait_until_ready(engine, lambda _phase: None)
            shape = cluster.checkpoint.shape
            monkeypatch.setattr(cluster.workers, "reply_medians", dict)  # how fast this machine is now does not matter
            # Planned for text that wants other experts; reading is so slow here that who is at home decides.
            cluster.figures = Figures("k", HOME, {"worker-1": NEAR, "worker-2": NEAR})
            others = zipf_layers(len(shape.layers), shape.num_experts, shape.top_k, 2.0, seed=1)
            refuse = _Refusing()
            broken = Replanner(cluster, refuse)
            before = cluster.plan
            with pytest.raises(RuntimeError, match="no step comes"):
                await asyncio.to_thread(lambda: broken.replan(frequencies=others, force=True))
            assert cluster.plan is before, "a move that was interrupted changed the plan"
            assert cluster.frequencies is None
            assert await _answer(engine) == expected
            stopped = Replanner(cluster, engine.run_between_steps)
            stopped.close(0)  # as when the coordinator is told to end while experts are on their way
            with pytest.raises(PlanError, match="interrupted"):
                await asyncio.to_thread(lambda: stopped.replan(frequencies=others, force=True))
            assert cluster.plan is before
            assert not stopped.done
            await asyncio.to_thread(cluster.workers.wait)
            assert before is not None
            for node, link in enumerate(cluster.links, 1):
                held = {layer: set(e) for layer, e in zip(before.layers, before.held_by(node), strict=True) if e}
                assert link.ready is not None
                assert {layer: set(e) for layer, e in link.ready.held.items() if e} == held, "workers kept the new plan"
            assert await _answer(engine) == expected

            replanner = Replanner(cluster, engine.run_between_steps, period_s=0.1)
            assert await asyncio.to_thread(lambda: replanner.replan(frequencies=others, force=True)) is not None
            planned = cluster.plan
            replanner.start()
            deadline = asyncio.get_running_loop().time() + 60
            while len(replanner.done) < 2 and asyncio.get_running_loop().time() < deadline:
                assert await _answer(engine) == expected
            replanner.close(30)
            assert len(replanner.done) >= 2, "the drift was not noticed"
            again = replanner.done[1]
            assert "other experts than planned" in again.why
            assert again.best_s <= again.step_s
            assert (cluster.plan is not planned) == again.moved
            assert cluster.frequencies != others
            assert await _answer(engine) == expected
        finally:
            assert await asyncio.to_thread(engine.stop, 30)


class _Refusing:
    """Steps never come."""

    def __call__(self, work: object) -> Future:
        future: Future = Future()
        future.set_exception(RuntimeError("no step comes"))
        return future


async def _answer(engine: Engine) -> list[int]:
    tokens: list[int] = []
    async for event in engine.submit(GenerationRequest(PROMPT, 40, Sampling(temperature=0))):
        if isinstance(event, TextDelta):
            tokens += event.tokens
    return tokens
