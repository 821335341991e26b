"""The loop from a prompt to tokens of one sequence alone, for references and measurements. Knows no text.

The engine runs `batch.py` instead, which does the same operations for one row.

Computes what mlx-lm's `generate_step` computes, operation by operation, so that greedy tokens are bit-identical. It
differs in what it leaves out: no step runs beyond the last token wanted (a step may cost network round trips), and
cancellation is looked at between prefill chunks and between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx

from titan.coordinator.generation.model import DEFAULT_PREFILL_STEP_TOKENS
from titan.coordinator.generation.sampling import Sampler
from titan.coordinator.generation.step import Pending, Step, pending_step

__all__ = ["Step", "decode"]

_STEPS_BETWEEN_CACHE_CLEARS = 256


def decode(
    model: Callable[..., mx.array],
    prompt: Sequence[int],
    cache: list[Any],
    *,
    sampler: Sampler,
    max_tokens: int,
    top_logprobs: int | None = None,
    prefill_step_tokens: int = DEFAULT_PREFILL_STEP_TOKENS,
    lookahead: bool = True,
    cancelled: Callable[[], bool] = lambda: False,
    on_prefill: Callable[[int], None] = lambda _: None,
) -> Generator[Step]:
    """Yield at most `max_tokens` tokens that continue `prompt`; end early when `cancelled()`.

    Args:
        model: called as `model(tokens [1, n], cache=cache) -> logits [1, n, vocabulary]`.
        prompt: token ids, at least one, that `cache` does not hold yet.
        cache: mlx-lm's prompt cache; it grows in place.
        sampler: from log-probabilities [1, vocabulary] to a token [1].
        top_logprobs: None for no log-probabilities, otherwise how many of the likeliest tokens to report.
        prefill_step_tokens: prompt tokens a forward pass.
        lookahead: start step n + 1 before token n is read (never beyond `max_tokens`).
        on_prefill: told how many prompt tokens are done, after each chunk.
    """

    def step(tokens: mx.array, cache: list[Any]) -> Pending:
        # The cache is an argument, not a free variable: a traceback that somebody keeps would keep it alive.
        logits = model(tokens[None], cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        sampled = sampler(logprobs)
        return pending_step(logprobs, sampled, top_logprobs)

    remaining = mx.array(list(prompt))
    done = 0
    while len(remaining) > 1:
        if cancelled():
            return
        count = min(prefill_step_tokens, len(remaining) - 1)
        model(remaining[:count][None], cache=cache)
        mx.eval([entry.state for entry in cache])
        remaining = remaining[count:]
        done += count
        on_prefill(done)
        mx.clear_cache()

    if cancelled():
        return
    current = step(remaining, cache)
    for n in range(max_tokens):
        wanted = n + 1 < max_tokens
        following = step(current.tokens, cache) if lookahead and wanted and not cancelled() else None
        yield current.read([top_logprobs])[0]
        if n % _STEPS_BETWEEN_CACHE_CLEARS == 0:
            mx.clear_cache()
        if not wanted or cancelled():
            return
        current = step(current.tokens, cache) if following is None else following
