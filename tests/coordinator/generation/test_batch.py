"""Sequences that decode together. Run: `.venv/bin/pytest tests/coordinator/generation/test_batch.py`."""

from __future__ import annotations

import random
from typing import Any, cast

import mlx.core as mx
import pytest
from fixtures.generation import PROMPTS, Probe, demo_model
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.coordinator.bench.alone import decode_alone
from titan.coordinator.generation.batch import Batch, Row
from titan.coordinator.generation.prefill import Prefill
from titan.coordinator.generation.request import Sampling
from titan.coordinator.generation.sampling import make_sampler
from titan.coordinator.generation.step import Step

TOKENS = 24
GREEDY = make_sampler(Sampling(temperature=0))


@pytest.fixture(scope="module")
def model() -> Probe:
    return Probe(demo_model())


@pytest.fixture(scope="module")
def prompts(tokenizer: TokenizerWrapper) -> list[list[int]]:
    """Of 3 to several hundred tokens."""
    return [tokenizer.encode(text) for text in (*PROMPTS, PROMPTS[3] * 3, "x")]


def join(batch: Batch[Row], model: Probe, prompt: list[int], tokens: int = TOKENS, top: int | None = 3) -> Row:
    prefill = Prefill(model, prompt, make_prompt_cache(model._model), 64, None)
    while not prefill.complete:
        prefill.advance()
    row = Row(prompt[-1], tokens, GREEDY, greedy=True, top_logprobs=top)
    batch.join(row, prefill.cache)
    return row


def alone(model: Probe, prompt: list[int], tokens: int = TOKENS) -> list[Step]:
    cache = make_prompt_cache(model._model)
    return list(decode_alone(model, cache, prompt, tokens, top_logprobs=3))


@pytest.mark.parametrize("lookahead", [True, False])
def test_sequences_together_equal_each_alone_in_tokens_and_logprobs(
    model: Probe, prompts: list[list[int]], lookahead: bool
) -> None:
    batch: Batch[Row] = Batch(model)
    for prompt in prompts:
        join(batch, model, prompt)
    found: list[list[Step]] = [[] for _ in prompts]
    for _ in range(TOKENS):
        for steps, step in zip(found, batch.step(lookahead=lambda: lookahead), strict=True):
            steps.append(step)
    assert found == [alone(model, prompt) for prompt in prompts]


def test_sequences_together_equal_mlx_lms_batch_generator(model: Probe, prompts: list[list[int]]) -> None:
    generator = BatchGenerator(model._model, max_tokens=TOKENS, prefill_step_size=64)
    uids = generator.insert(prompts, max_tokens=[TOKENS] * len(prompts))
    reference: dict[int, list[int]] = {uid: [] for uid in uids}
    while any(len(tokens) < TOKENS for tokens in reference.values()):
        for response in generator.next_generated():
            reference[response.uid].append(response.token)
    generator.close()
    batch: Batch[Row] = Batch(model)
    for prompt in prompts:
        join(batch, model, prompt, top=None)
    found = [[step.token for step in batch.step(lookahead=lambda: True)] for _ in range(TOKENS)]
    assert [list(tokens) for tokens in zip(*found, strict=True)] == [reference[uid] for uid in uids]


@pytest.mark.parametrize("seed", range(2))
def test_sequences_that_come_and_go_do_not_change_each_other(model: Probe, prompts: list[list[int]], seed: int) -> None:
    chance = random.Random(seed)
    expected = {i: alone(model, prompt) for i, prompt in enumerate(prompts)}
    batch: Batch[Row] = Batch(model)
    present: dict[Row, tuple[int, list[Step]]] = {}
    waiting = [chance.randrange(len(prompts)) for _ in range(10)]
    complete = 0
    while waiting or present:
        if waiting and (not present or chance.random() < 0.3) and not batch.under_way:
            number = waiting.pop()
            present[join(batch, model, prompts[number])] = (number, [])
        rows = list(batch.rows)
        for row, step in zip(rows, batch.step(lookahead=lambda: chance.random() < 0.7), strict=True):
            present[row][1].append(step)
        leaving = [row for row in rows if row.remaining == 0 or chance.random() < 0.01]
        batch.keep([i for i, row in enumerate(rows) if row not in leaving])
        for row in leaving:
            number, steps = present.pop(row)
            assert steps == expected[number][: len(steps)]
            complete += len(steps) == TOKENS
    assert complete >= 3


def test_no_padding_is_ever_run(model: Probe, prompts: list[list[int]]) -> None:
    """Every token that enters the model is a prompt's or a drawn one, so experts see no row that is not asked for."""
    model.reset()
    batch: Batch[Row] = Batch(model)
    for prompt in prompts:
        join(batch, model, prompt)
    assert sum(model.call_tokens) == sum(len(prompt) - 1 for prompt in prompts)
    batch.step()
    assert model.call_tokens[-1] == 1
    assert model.rows == len(prompts)


def test_each_sequence_draws_with_its_own_seed(model: Probe, prompts: list[list[int]]) -> None:
    batch: Batch[Row] = Batch(model)
    samplings = [Sampling(temperature=0.9, seed=i, top_p=0.95 if i % 2 else 1.0) for i in range(3)] + [
        Sampling(temperature=0)
    ]
    for prompt, sampling in zip(prompts, samplings, strict=False):
        row = join(batch, model, prompt, top=None)
        row.sampler, row.greedy = make_sampler(sampling), sampling.greedy
    found = list(
        zip(*[[step.token for step in batch.step(lookahead=lambda: True)] for _ in range(TOKENS)], strict=True)
    )
    for tokens, prompt, sampling in zip(found, prompts, samplings, strict=False):
        cache = make_prompt_cache(model._model)
        steps = decode_alone(model, cache, prompt, TOKENS, sampling)
        assert list(tokens) == [step.token for step in steps]


def test_a_sequence_that_leaves_frees_its_memory(model: Probe, prompts: list[list[int]]) -> None:
    batch: Batch[Row] = Batch(model)
    join(batch, model, prompts[0])
    batch.step()
    before_bytes = mx.get_active_memory()
    join(batch, model, prompts[4])
    batch.step(lookahead=lambda: True)
    assert mx.get_active_memory() > before_bytes + (1 << 20)
    batch.keep([0])
    batch.settle()
    assert mx.get_active_memory() <= before_bytes
    batch.keep([])
    assert mx.get_active_memory() < before_bytes


def test_keys_and_values_of_a_row_are_those_it_has_alone(model: Probe, prompts: list[list[int]]) -> None:
    batch: Batch[Row] = Batch(model)
    for prompt in prompts[:4]:
        join(batch, model, prompt)
    for row, prompt in enumerate(prompts[:4]):
        cache = make_prompt_cache(model._model)
        model(mx.array(prompt[:-1])[None], cache=cache)
        for (keys, values), entry in zip(batch.keys_and_values(row, 1, len(prompt) - 1), cache, strict=True):
            assert mx.array_equal(keys, entry.keys[0, :, 1 : len(prompt) - 1])
            assert mx.array_equal(values, entry.values[0, :, 1 : len(prompt) - 1])


def test_a_failed_step_is_rewound_in_every_layer(model: Probe, prompts: list[list[int]]) -> None:
    expected = [alone(model, prompt) for prompt in prompts[:3]]
    batch: Batch[Row] = Batch(model)
    for prompt in prompts[:3]:
        join(batch, model, prompt)
    layer = cast("Any", model._model).model.layers[3]
    calls = 0

    class Failing(type(layer)):
        def __call__(self, *args: Any, **values: Any) -> mx.array:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise RuntimeError("injected")
            return super().__call__(*args, **values)

    found: list[list[Step]] = [[batch_step] for batch_step in batch.step()]
    original = type(layer)
    layer.__class__ = Failing
    try:
        with pytest.raises(RuntimeError, match="injected"):
            batch.step()
        assert batch.rewind()
        outcomes = batch.step_apart()
    finally:
        layer.__class__ = original
    for steps, outcome in zip(found, outcomes, strict=True):
        assert isinstance(outcome, Step)
        steps.append(outcome)
    for _ in range(TOKENS - 2):
        for steps, step in zip(found, batch.step(lookahead=lambda: True), strict=True):
            steps.append(step)
    assert found == expected
