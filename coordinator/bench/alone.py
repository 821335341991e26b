"""One sequence alone through the engine's own prefill and batch, for measurements and comparisons. Knows no text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx

from titan.coordinator.generation.batch import Batch, Row
from titan.coordinator.generation.model import DEFAULT_PREFILL_STEP_TOKENS, LoadedModel
from titan.coordinator.generation.prefill import Prefill
from titan.coordinator.generation.request import Sampling
from titan.coordinator.generation.sampling import make_sampler
from titan.coordinator.generation.step import Step

__all__ = ["decode_alone", "greedy_tokens"]

GREEDY = Sampling(temperature=0)


def decode_alone(
    model: Callable[..., mx.array],
    cache: list[Any],
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling = GREEDY,
    *,
    top_logprobs: int | None = None,
    prefill_step_tokens: int = DEFAULT_PREFILL_STEP_TOKENS,
    lookahead: bool = False,
) -> Generator[Step]:
    """Yield `tokens` tokens that continue `prompt`, whatever they are.

    Args:
        model: called as `model(tokens [1, n], cache=cache) -> logits [1, n, vocabulary]`.
        cache: mlx-lm's prompt cache, empty; it grows in place.
        top_logprobs: None for no log-probabilities, otherwise how many of the likeliest tokens to report.
        lookahead: start the next step before a token is read.
    """
    prefill = Prefill(model, prompt, cache, prefill_step_tokens, None)
    while not prefill.complete:
        prefill.advance()
    batch: Batch[Row] = Batch(model)
    row = Row(prompt[-1], tokens, make_sampler(sampling), greedy=sampling.greedy, top_logprobs=top_logprobs)
    batch.join(row, cache)
    for _ in range(tokens):
        yield batch.step(lookahead=lambda: lookahead)[0]


def greedy_tokens(loaded: LoadedModel, prompt: Sequence[int], tokens: int, *, lookahead: bool = False) -> list[int]:
    """The likeliest tokens that continue `prompt`."""
    steps = decode_alone(loaded.model, loaded.make_cache(), prompt, tokens, lookahead=lookahead)
    return [step.token for step in steps]
