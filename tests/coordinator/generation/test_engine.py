"""The engine on the demo model. Run: `.venv/bin/pytest tests/coordinator/generation/test_engine.py`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from fixtures.generation import CONTEXT_TOKENS, DEADLINE_S, PROMPTS, ProbedEngine, demo_model, wait_until
from mlx_lm.generate import stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.common.errors import CheckpointMissing, ContextTooLong, EngineFailed, EngineNotReady, QueueFull
from titan.coordinator.generation import Engine, Finished, GenerationRequest, Handle, LoadedModel, Sampling, TextDelta

GREEDY = Sampling(temperature=0)
ROOT = Path(__file__).parents[3]


def request(
    tokenizer: TokenizerWrapper, prompt: str = PROMPTS[0], max_tokens: int = 12, **values: Any
) -> GenerationRequest:
    values.setdefault("sampling", GREEDY)
    return GenerationRequest(tuple(tokenizer.encode(prompt)), max_tokens, **values)


async def read(handle: Handle) -> tuple[str, tuple[int, ...], Finished]:
    text, tokens, finished = "", (), None
    async with asyncio.timeout(DEADLINE_S):
        async for event in handle:
            if isinstance(event, TextDelta):
                text += event.text
                tokens += event.tokens
            else:
                finished = event
    assert finished is not None
    return text, tokens, finished


class Gate:
    """Holds the engine's thread before a model call until the test opens it."""

    def __init__(self, probed: ProbedEngine, at_call: int = 0) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self._calls = -1
        self._at_call = at_call
        self.failure: Exception | None = None
        probed.probe.before(self._before)

    def _before(self, _: int) -> None:
        self._calls += 1
        if self._calls == self._at_call:
            self.reached.set()
            assert self.open.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure


@pytest.mark.parametrize("lookahead", [True, False])
async def test_text_and_tokens_equal_mlx_lm(tokenizer: TokenizerWrapper, lookahead: bool) -> None:
    model = demo_model()
    with ProbedEngine(prefill_step_tokens=16, lookahead=lambda: lookahead) as probed:
        for prompt in PROMPTS:
            reference = list(
                stream_generate(model, tokenizer, tokenizer.encode(prompt), max_tokens=40, prefill_step_size=16)
            )
            text, tokens, finished = await read(probed.engine.submit(request(tokenizer, prompt, 40)))
            assert text == "".join(r.text for r in reference)
            assert finished.reason == reference[-1].finish_reason
            assert finished.usage.prompt_tokens == reference[-1].prompt_tokens
            assert finished.usage.completion_tokens == reference[-1].generation_tokens
            ends = [t for t in [reference[-1].token] if t in tokenizer.eos_token_ids]
            assert len(tokens) + len(ends) == finished.usage.completion_tokens
    assert probed.closed


async def test_requests_are_answered_in_order(probed: ProbedEngine, tokenizer: TokenizerWrapper) -> None:
    order: list[int] = []

    async def follow(index: int, handle: Handle) -> None:
        await read(handle)
        order.append(index)

    handles = probed.engine.submit_all([request(tokenizer, max_tokens=3) for _ in range(4)])
    await asyncio.gather(*(follow(i, h) for i, h in enumerate(handles)))
    assert order == [0, 1, 2, 3]


async def test_a_seed_is_reproducible_whatever_ran_before(probed: ProbedEngine, tokenizer: TokenizerWrapper) -> None:
    seeded = request(tokenizer, sampling=Sampling(temperature=1.2, seed=11))
    first = await read(probed.engine.submit(seeded))
    other = await read(probed.engine.submit(request(tokenizer, sampling=Sampling(temperature=1.2, seed=12))))
    again = await read(probed.engine.submit(seeded))
    assert first[:2] == again[:2] != other[:2]


async def test_a_full_queue_refuses_and_takes_several_requests_whole(
    probed: ProbedEngine, tokenizer: TokenizerWrapper
) -> None:
    gate = Gate(probed)
    running = probed.engine.submit(request(tokenizer, max_tokens=1))
    wait_until(gate.reached.is_set, "the first request to run")
    waiting = probed.engine.submit_all([request(tokenizer, max_tokens=1)] * 7)
    with pytest.raises(QueueFull):
        probed.engine.submit_all([request(tokenizer, max_tokens=1)] * 2)
    assert probed.engine.status().queued == 7
    waiting.append(probed.engine.submit(request(tokenizer, max_tokens=1)))
    with pytest.raises(QueueFull, match="8 requests wait already"):
        probed.engine.submit(request(tokenizer, max_tokens=1))
    assert 1 <= probed.engine.retry_after_s() <= 60
    gate.open.set()
    for handle in [running, *waiting]:
        assert (await read(handle))[2].reason == "length"


async def test_cancel_ends_a_running_request_within_a_step(probed: ProbedEngine, tokenizer: TokenizerWrapper) -> None:
    gate = Gate(probed, at_call=6)
    handle = probed.engine.submit(request(tokenizer, max_tokens=500))
    wait_until(gate.reached.is_set, "the sixth call")
    handle.cancel()
    gate.open.set()
    _, _, finished = await read(handle)
    assert finished.reason == "cancelled"
    assert len(probed.probe.call_tokens) == 7
    assert (await read(probed.engine.submit(request(tokenizer))))[2].reason == "length"


async def test_cancel_ends_a_prefill_between_chunks(tokenizer: TokenizerWrapper) -> None:
    with ProbedEngine(prefill_step_tokens=8) as probed:
        gate = Gate(probed, at_call=2)
        handle = probed.engine.submit(request(tokenizer, PROMPTS[3]))
        wait_until(gate.reached.is_set, "the third chunk")
        assert handle.prefilled_tokens == 16
        handle.cancel()
        gate.open.set()
        text, _, finished = await read(handle)
        assert (text, finished.reason, finished.usage.completion_tokens) == ("", "cancelled", 0)
        assert probed.probe.call_tokens == [8, 8, 8]


async def test_cancel_of_a_waiting_request_frees_its_place(probed: ProbedEngine, tokenizer: TokenizerWrapper) -> None:
    gate = Gate(probed)
    running = probed.engine.submit(request(tokenizer, max_tokens=1))
    wait_until(gate.reached.is_set, "the first request to run")
    waiting = probed.engine.submit_all([request(tokenizer, max_tokens=1)] * 8)
    waiting[3].cancel()
    assert (await read(waiting[3]))[2].reason == "cancelled"
    assert probed.engine.status().queued == 7
    gate.open.set()
    assert (await read(running))[2].reason == "length"
    for handle in waiting[:3] + waiting[4:]:
        assert (await read(handle))[2].reason == "length"


async def test_a_prompt_that_fails_ends_that_request_alone(probed: ProbedEngine, tokenizer: TokenizerWrapper) -> None:
    def fail(tokens: int) -> None:
        if tokens == len(tokenizer.encode(PROMPTS[1])) - 1:
            raise RuntimeError("injected")

    expected = await read(probed.engine.submit(request(tokenizer)))
    probed.probe.before(fail)
    failing, following = probed.engine.submit_all(
        [request(tokenizer, PROMPTS[1], request_id="req-1"), request(tokenizer)]
    )
    with pytest.raises(EngineFailed, match=r"RuntimeError in the model.*req-1"):
        await read(failing)
    assert (await read(following))[:2] == expected[:2]
    assert probed.engine.status().state == "ready"


@pytest.mark.parametrize("lookahead", [True, False])
async def test_a_step_that_fails_is_tried_for_each_sequence_alone(tokenizer: TokenizerWrapper, lookahead: bool) -> None:
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    with ProbedEngine(lookahead=lambda: lookahead) as probed:
        expected = [await read(probed.engine.submit(request(tokenizer, prompt, 20))) for prompt in prompts]
        rows: list[int] = []

        def fail(_: int) -> None:
            rows.append(probed.probe.rows)
            if rows.count(3) > 3 and probed.probe.rows == 3:
                raise RuntimeError("injected")

        probed.probe.before(fail)
        handles = probed.engine.submit_all([request(tokenizer, prompt, 20) for prompt in prompts])
        found = [await read(handle) for handle in handles]
        assert [answer[:2] for answer in found] == [answer[:2] for answer in expected]
        assert rows.count(3) > 5, "the batch was not stepped as one"


async def test_a_sequence_that_fails_alone_too_leaves_the_others(
    probed: ProbedEngine, tokenizer: TokenizerWrapper
) -> None:
    expected = await read(probed.engine.submit(request(tokenizer, PROMPTS[1], 20)))
    left = 2  # the batch's step, and the first sequence's alone
    together = False

    def fail(_: int) -> None:
        nonlocal left, together
        together = together or probed.probe.rows == 2
        if together and left:
            left -= 1
            raise RuntimeError("injected")

    probed.probe.before(fail)
    first, second = probed.engine.submit_all([request(tokenizer, PROMPTS[0], 20), request(tokenizer, PROMPTS[1], 20)])
    with pytest.raises(EngineFailed):
        await read(first)
    assert (await read(second))[:2] == expected[:2]


@pytest.mark.parametrize("failing", [True, False])
async def test_a_request_that_fails_or_is_cancelled_frees_its_memory(
    probed: ProbedEngine, tokenizer: TokenizerWrapper, failing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    await read(probed.engine.submit(request(tokenizer)))
    before_bytes = mx.get_active_memory()
    gate = Gate(probed, at_call=20)
    handle = probed.engine.submit(request(tokenizer, PROMPTS[3], max_tokens=500))
    wait_until(gate.reached.is_set, "the twentieth call")
    assert mx.get_active_memory() > before_bytes
    if failing:
        gate.failure = RuntimeError("injected")
        gate.open.set()
        with pytest.raises(EngineFailed):
            await read(handle)
        assert caplog.records, "the log may keep the traceback, but not what its frames held"
    else:
        handle.cancel()
        gate.open.set()
        await read(handle)
    wait_until(lambda: probed.engine.status().running == 0, "the request to end")
    # A request's KV cache is 2 MiB here; scalars of the engine's own may come and go.
    wait_until(lambda: mx.get_active_memory() <= before_bytes + (64 << 10), "its memory to come back")


async def test_a_reader_whose_loop_is_gone_does_not_hurt(probed: ProbedEngine, tokenizer: TokenizerWrapper) -> None:
    gate = Gate(probed)

    async def submit_and_leave() -> None:
        probed.engine.submit(request(tokenizer, max_tokens=900))

    await asyncio.to_thread(asyncio.run, submit_and_leave())
    gate.open.set()
    wait_until(lambda: probed.engine.status().running == 0, "the abandoned request to end")
    assert len(probed.probe.call_tokens) < 20
    assert (await read(probed.engine.submit(request(tokenizer))))[2].reason == "length"


async def test_what_does_not_fit_the_context_is_refused(probed: ProbedEngine, tokenizer: TokenizerWrapper) -> None:
    with pytest.raises(ContextTooLong):
        probed.engine.submit(request(tokenizer, max_tokens=CONTEXT_TOKENS))


async def test_the_whole_context_can_be_used(tokenizer: TokenizerWrapper) -> None:
    with ProbedEngine(context_tokens=64) as probed:
        whole = GenerationRequest(tuple(tokenizer.encode(PROMPTS[3]))[:62], 2, GREEDY)
        assert (await read(probed.engine.submit(whole)))[2].usage.completion_tokens == 2


async def test_a_model_that_cannot_be_loaded_is_said(tokenizer: TokenizerWrapper) -> None:
    def load() -> LoadedModel:
        raise CheckpointMissing("config.json is not in /models/x", "give the directory of a checkpoint")

    engine = Engine(load)
    engine.start()
    wait_until(lambda: engine.status().state == "failed", "loading to fail")
    assert "config.json is not in /models/x" in engine.status().phase
    with pytest.raises(EngineNotReady, match=r"config\.json"):
        engine.submit(request(tokenizer))
    assert engine.stop(DEADLINE_S)


async def test_while_loading_the_phase_is_told_and_requests_are_refused() -> None:
    go_on = threading.Event()

    def load() -> LoadedModel:
        engine.report_phase("reading layer 3 of 8")
        assert go_on.wait(DEADLINE_S)
        raise RuntimeError("enough")

    engine = Engine(load)
    engine.start()
    wait_until(lambda: engine.status().phase == "reading layer 3 of 8", "the phase")
    with pytest.raises(EngineNotReady, match="reading layer 3 of 8"):
        engine.served()
    go_on.set()
    wait_until(lambda: engine.status().state == "failed", "loading to end")
    assert engine.stop(DEADLINE_S)


async def test_stop_ends_running_and_waiting_requests_and_the_thread(tokenizer: TokenizerWrapper) -> None:
    threads = set(threading.enumerate())
    with ProbedEngine(max_sequences=1) as probed:
        gate = Gate(probed, at_call=4)
        running, waiting = probed.engine.submit_all([request(tokenizer, max_tokens=900)] * 2)
        wait_until(gate.reached.is_set, "the request to run")
        assert not probed.engine.stop(0.0)
        with pytest.raises(EngineNotReady, match="stopping"):
            await read(waiting)
        with pytest.raises(EngineNotReady, match="stopping"):
            probed.engine.submit(request(tokenizer))
        gate.open.set()
        assert (await read(running))[2].reason == "cancelled"
        assert probed.engine.stop(DEADLINE_S)
        assert probed.closed
    assert set(threading.enumerate()) == threads


def test_an_engine_that_never_started_stops_at_once() -> None:
    def load() -> LoadedModel:
        raise AssertionError("not called")

    assert Engine(load).stop(0.0)


def test_a_program_that_forgets_to_stop_ends_cleanly() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from fixtures.generation import ProbedEngine\n"
        "probed = ProbedEngine().__enter__()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT
    )
    assert (result.returncode, result.stderr) == (0, "")
