"""Several requests on one engine, and the engine's own troubles.

Run: `.venv/bin/pytest tests/coordinator/generation/test_serving_together.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.generation import DEADLINE_S, PROMPTS, ProbedEngine, wait_until
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.common.errors import EngineFailed, EngineNotReady
from titan.coordinator.generation import Finished, GenerationRequest, Handle, Sampling, TextDelta
from titan.coordinator.generation.observer import Unobserved
from titan.coordinator.generation.room import GROWTH_TOKENS
from titan.coordinator.generation.supervisor import MAX_RESTARTS_A_MINUTE

GREEDY = Sampling(temperature=0)


def request(
    tokenizer: TokenizerWrapper, prompt: str = PROMPTS[0], max_tokens: int = 12, **values: Any
) -> GenerationRequest:
    values.setdefault("sampling", GREEDY)
    return GenerationRequest(tuple(tokenizer.encode(prompt)), max_tokens, **values)


async def read(handle: Handle) -> tuple[tuple[int, ...], Finished]:
    tokens: tuple[int, ...] = ()
    async with asyncio.timeout(DEADLINE_S):
        async for event in handle:
            if isinstance(event, TextDelta):
                tokens += event.tokens
            else:
                return tokens, event
    raise AssertionError("no end")


def waiting_for(event: threading.Event) -> Callable[[int], None]:
    def wait(_: int) -> None:
        assert event.wait(DEADLINE_S)

    return wait


async def test_requests_together_give_what_each_gives_alone(tokenizer: TokenizerWrapper) -> None:
    requests = [request(tokenizer, prompt, 30) for prompt in PROMPTS] + [
        request(tokenizer, PROMPTS[1], 30, sampling=Sampling(temperature=1.0, seed=3, top_p=0.9)),
        request(tokenizer, PROMPTS[0], 30, sampling=Sampling(temperature=0, repetition_penalty=1.3)),
        request(tokenizer, PROMPTS[0], 30, sampling=Sampling(temperature=0, frequency_penalty=1.5)),
        request(tokenizer, PROMPTS[0], 30, sampling=Sampling(temperature=0, logit_bias=((5, 100.0),))),
    ]
    with ProbedEngine(max_sequences=8, prefill_step_tokens=32) as probed:
        alone = [(await read(probed.engine.submit(r)))[0] for r in requests]
        probed.probe.reset()
        rows: list[int] = []
        probed.probe.before(lambda _: rows.append(probed.probe.rows))
        together = await asyncio.gather(*(read(handle) for handle in probed.engine.submit_all(requests)))
        assert [tokens for tokens, _ in together] == alone
        assert max(rows) == len(requests)
    assert len(set(alone)) > 5, "the samplings make no difference"
    assert set(alone[-1]) == {5}, "a bias of 100 decides"


async def test_streams_go_on_between_the_chunks_of_a_long_prompt(tokenizer: TokenizerWrapper) -> None:
    long = PROMPTS[3] * 3
    with ProbedEngine(prefill_step_tokens=16) as probed:
        running = probed.engine.submit(request(tokenizer, max_tokens=200))
        wait_until(lambda: running.generated_tokens > 2, "the stream to run")
        probed.probe.reset()
        await read(probed.engine.submit(request(tokenizer, long, 2)))
        running.cancel()
        calls = probed.probe.call_tokens
        chunks = [i for i, tokens in enumerate(calls) if tokens == 16]
        assert len(chunks) >= 10
        assert all(b - a == 2 for a, b in itertools.pairwise(chunks)), "not one step between two chunks"
        await read(running)


async def test_kv_memory_bounds_what_runs_together(tokenizer: TokenizerWrapper) -> None:
    budget = 3 * (len(tokenizer.encode(PROMPTS[0])) + 90 + GROWTH_TOKENS)
    with ProbedEngine(context_tokens=128, kv_tokens=budget) as probed:
        gate = threading.Event()
        probed.probe.before(waiting_for(gate))
        handles = probed.engine.submit_all([request(tokenizer, max_tokens=90) for _ in range(4)])
        gate.set()
        wait_until(lambda: probed.engine.status().decoding == 3, "three sequences to run")
        status = probed.engine.status()
        assert (status.queued, status.kv_budget_tokens) == (1, budget)
        assert status.kv_tokens <= budget
        for handle in handles:
            assert (await read(handle))[1].reason == "length"
        assert probed.engine.status().completed == 4


async def test_more_run_at_once_than_could_to_their_end_and_one_makes_room(tokenizer: TokenizerWrapper) -> None:
    budget = 2100  # four sequences of 268 places; to their ends they would need 4 * (302 + 255)
    requests = [
        request(tokenizer, PROMPTS[0], 300, ignore_end=True, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in range(4)
    ]
    with ProbedEngine(context_tokens=512, kv_tokens=budget) as probed:
        alone, _ = await read(probed.engine.submit(requests[3]))
        probed.probe.reset()
        places: list[int] = []
        set_back: list[int] = []

        def look(_: int) -> None:
            places.append(probed.probe.kv_places)
            set_back.append(probed.engine.status().set_back)

        probed.probe.before(look)
        together = await asyncio.gather(*(read(handle) for handle in probed.engine.submit_all(requests)))
        assert together[3][0] == alone, "the one that made room"
        assert all(end.usage.completion_tokens == 300 for _, end in together)
        assert max(set_back) == 1
        assert 4 * 256 <= max(places) <= budget
        wait_until(lambda: probed.engine.status().kv_tokens == 0, "all memory to be free")
        assert (probed.engine.status().set_back, probed.engine.status().completed) == (0, 5)


async def test_one_that_made_room_can_be_cancelled(tokenizer: TokenizerWrapper) -> None:
    with ProbedEngine(context_tokens=512, kv_tokens=2100) as probed:
        handles = probed.engine.submit_all([request(tokenizer, PROMPTS[0], 300, ignore_end=True)] * 4)
        wait_until(lambda: probed.engine.status().set_back == 1, "one to make room")
        handles[3].cancel()
        assert (await read(handles[3]))[1].reason == "cancelled"
        wait_until(lambda: probed.engine.status().set_back == 0, "nothing to be set back")
        for handle in handles[:3]:
            handle.cancel()


async def test_work_runs_between_steps_and_when_idle(tokenizer: TokenizerWrapper) -> None:
    with ProbedEngine() as probed:
        engine = probed.engine
        assert engine.run_between_steps(threading.current_thread).result(DEADLINE_S).name == "titan-engine"
        expected, _ = await read(engine.submit(request(tokenizer, max_tokens=60)))
        inside = False
        overlaps: list[bool] = []

        def before(_: int) -> None:
            overlaps.append(inside)

        def work() -> int:
            nonlocal inside
            inside = True
            at = len(probed.probe.call_tokens)
            inside = False
            return at

        probed.probe.reset()
        probed.probe.before(before)
        handle = engine.submit(request(tokenizer, max_tokens=60))
        wait_until(lambda: handle.generated_tokens > 3, "the stream to run")
        at = engine.run_between_steps(work).result(DEADLINE_S)
        tokens, _ = await read(handle)
        assert 3 < at < len(probed.probe.call_tokens)
        assert not any(overlaps)
        assert tokens == expected

        def fails() -> None:
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            engine.run_between_steps(fails).result(DEADLINE_S)
        assert engine.status().state == "ready"
    with pytest.raises(EngineNotReady):
        engine.run_between_steps(lambda: 1).result(DEADLINE_S)


async def test_a_step_that_does_not_end_is_noticed_and_said(tokenizer: TokenizerWrapper) -> None:
    with ProbedEngine(stuck_after_s=0.2) as probed:
        go_on = threading.Event()
        probed.probe.before(waiting_for(go_on))
        handle = probed.engine.submit(request(tokenizer))
        with pytest.raises(EngineFailed, match="one step of the model has been running"):
            await read(handle)
        assert probed.engine.status().state == "stuck"
        with pytest.raises(EngineNotReady, match="one step"):
            probed.engine.submit(request(tokenizer))
        go_on.set()
        wait_until(lambda: probed.engine.status().running == 0, "the step to end after all")
        assert probed.engine.status().state == "ready"
        assert (await read(probed.engine.submit(request(tokenizer))))[1].reason == "length"


class FailingObserver(Unobserved):
    """Breaks the engine's loop itself, as a fault in its code would."""

    failures = 0

    def stepped(self, rows: int, seconds: float) -> None:
        if self.failures:
            self.failures -= 1
            raise ZeroDivisionError


async def test_a_loop_that_fails_begins_anew_with_the_model_kept(tokenizer: TokenizerWrapper) -> None:
    observer = FailingObserver()
    with ProbedEngine(observer=observer) as probed:
        probe = probed.probe
        expected, _ = await read(probed.engine.submit(request(tokenizer)))
        observer.failures = 1
        handles = probed.engine.submit_all([request(tokenizer)] * 3)
        failed = 0
        for handle in handles:
            try:
                assert (await read(handle))[0] == expected
            except EngineFailed:
                failed += 1
        assert failed >= 1
        assert (await read(probed.engine.submit(request(tokenizer))))[0] == expected
        assert probed.probe is probe, "the model was loaded again"
        assert (probed.engine.status().state, probed.engine.status().restarts) == ("ready", 1)
        observer.failures = 100
        for _ in range(MAX_RESTARTS_A_MINUTE):
            wait_until(lambda: probed.engine.status().running == 0, "the loop to begin anew")
            with pytest.raises(EngineFailed):
                await read(probed.engine.submit(request(tokenizer)))
        wait_until(lambda: probed.engine.status().state == "failed", "the engine to give up")


async def test_draining_finishes_what_runs_and_takes_nothing_new(tokenizer: TokenizerWrapper) -> None:
    with ProbedEngine() as probed:
        handle = probed.engine.submit(request(tokenizer, max_tokens=40))
        probed.engine.drain()
        with pytest.raises(EngineNotReady, match="draining"):
            probed.engine.submit(request(tokenizer))
        assert (await read(handle))[1].reason == "length"
        probed.engine.resume()
        assert (await read(probed.engine.submit(request(tokenizer))))[1].reason == "length"
