"""One sequence in the batch, against mlx-lm. Run: `.venv/bin/pytest tests/coordinator/generation/test_alone.py`."""

from __future__ import annotations

from itertools import islice
from typing import Any, cast

import mlx.core as mx
import pytest
from fixtures.generation import PROMPTS, Probe, demo_model
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.coordinator.bench.alone import GREEDY, decode_alone
from titan.coordinator.generation.request import Sampling
from titan.coordinator.generation.step import Step


@pytest.fixture(scope="module")
def model() -> Probe:
    return Probe(demo_model())


def run(
    model: Probe, prompt: list[int], max_tokens: int = 24, sampling: Sampling = GREEDY, **options: Any
) -> list[Step]:
    cache = make_prompt_cache(model._model)
    return list(decode_alone(model, cache, prompt, max_tokens, sampling, **options))


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("prefill_step_tokens", [2048, 7])
def test_tokens_and_logprobs_are_bit_identical_to_generate_step(
    model: Probe, tokenizer: TokenizerWrapper, prompt: str, lookahead: bool, prefill_step_tokens: int
) -> None:
    ids = tokenizer.encode(prompt)
    steps = run(model, ids, top_logprobs=0, lookahead=lookahead, prefill_step_tokens=prefill_step_tokens)
    reference = [
        (token, logprobs[token].item())
        for token, logprobs in generate_step(
            mx.array(ids), model._model, max_tokens=24, prefill_step_size=prefill_step_tokens
        )
    ]
    assert [(step.token, step.logprob.logprob) for step in steps if step.logprob] == reference


def test_top_logprobs_are_the_likeliest_in_order(model: Probe, tokenizer: TokenizerWrapper) -> None:
    ids = tokenizer.encode(PROMPTS[1])
    (step,) = run(model, ids, max_tokens=1, top_logprobs=5)
    _, logprobs = next(generate_step(mx.array(ids), model._model, max_tokens=1))
    values = cast("list[float]", logprobs.tolist())
    order = sorted(enumerate(values), key=lambda pair: (-pair[1], pair[0]))[:5]
    assert step.logprob is not None
    assert list(step.logprob.top) == order
    assert (step.token, step.logprob.logprob) == order[0]


@pytest.mark.parametrize("lookahead", [True, False])
def test_no_step_runs_beyond_the_last_token_wanted(model: Probe, tokenizer: TokenizerWrapper, lookahead: bool) -> None:
    model.reset()
    ids = tokenizer.encode(PROMPTS[1])
    run(model, ids, max_tokens=5, lookahead=lookahead, prefill_step_tokens=len(ids) - 3)
    assert model.call_tokens == [len(ids) - 3, 2, 1, 1, 1, 1, 1]


def test_without_lookahead_no_step_runs_after_the_reader_stops(model: Probe, tokenizer: TokenizerWrapper) -> None:
    ids = tokenizer.encode(PROMPTS[0])
    counts = {}
    for lookahead in (True, False):
        model.reset()
        cache = make_prompt_cache(model._model)
        steps = decode_alone(model, cache, ids, 50, lookahead=lookahead)
        assert len(list(islice(steps, 3))) == 3
        steps.close()
        counts[lookahead] = len(model.call_tokens) - 1
    assert counts == {True: 4, False: 3}


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (Sampling(temperature=0.8, seed=7), {}),
        (Sampling(temperature=1.3, top_p=0.9, top_k=40, min_p=0.02, seed=-3), {}),
        (Sampling(temperature=1.0, top_p=0.5, seed=2**63), {"lookahead": True}),
    ],
)
def test_a_seed_gives_what_mlx_lm_gives_with_it(
    model: Probe, tokenizer: TokenizerWrapper, sampling: Sampling, options: dict[str, Any]
) -> None:
    from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

    ids = tokenizer.encode(PROMPTS[0])
    steps = run(model, ids, sampling=sampling, **options)
    mx.random.seed((sampling.seed or 0) % 2**64)
    reference = mlx_lm_sampler(sampling.temperature, sampling.top_p, sampling.min_p, 1, sampling.top_k)
    tokens = [token for token, _ in generate_step(mx.array(ids), model._model, max_tokens=24, sampler=reference)]
    assert [step.token for step in steps] == tokens


def test_top_k_beyond_the_vocabulary_keeps_everything(model: Probe, tokenizer: TokenizerWrapper) -> None:
    ids = tokenizer.encode(PROMPTS[0])
    plain = run(model, ids, sampling=Sampling(temperature=1.0, seed=5))
    assert run(model, ids, sampling=Sampling(temperature=1.0, seed=5, top_k=10**6)) == plain


def test_unseeded_requests_differ(model: Probe, tokenizer: TokenizerWrapper) -> None:
    ids = tokenizer.encode(PROMPTS[0])
    assert run(model, ids, sampling=Sampling(temperature=1.5)) != run(model, ids, sampling=Sampling(temperature=1.5))
