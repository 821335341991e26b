"""The loop from a prompt to tokens over an mlx-lm model. Runs on the engine's thread; knows no text and no requests.

Computes what mlx-lm's `generate_step` computes, operation by operation, so that greedy tokens are bit-identical. It
differs in what it leaves out: no step runs beyond the last token wanted (a step may cost network round trips), and
cancellation is looked at between prefill chunks and between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx

from titan.coordinator.generation.events import TokenLogprob
from titan.coordinator.generation.model import DEFAULT_PREFILL_STEP_TOKENS
from titan.coordinator.generation.sampling import Sampler

__all__ = ["Step", "decode"]

_STEPS_BETWEEN_CACHE_CLEARS = 256


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token, and its log-probabilities when they were asked for."""

    token: int
    logprob: TokenLogprob | None


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

    def step(tokens: mx.array, cache: list[Any]) -> _Pending:
        # The cache is an argument, not a free variable: a traceback that somebody keeps would keep it alive.
        logits = model(tokens[None], cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        sampled = sampler(logprobs)
        pending = _Pending(sampled, *_logprob_arrays(logprobs, sampled, top_logprobs))
        mx.async_eval(*pending)
        return pending

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
        following = step(current.token, cache) if lookahead and wanted and not cancelled() else None
        yield _read(current)
        if n % _STEPS_BETWEEN_CACHE_CLEARS == 0:
            mx.clear_cache()
        if not wanted or cancelled():
            return
        current = step(current.token, cache) if following is None else following


class _Pending(NamedTuple):
    """Arrays of a step that may still be computed: token [1], log-probabilities [1, 1], ids and values [1, top]."""

    token: mx.array
    chosen: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None


def _logprob_arrays(logprobs: mx.array, sampled: mx.array, top: int | None) -> tuple[mx.array, ...]:
    if top is None:
        return ()
    chosen = mx.take_along_axis(logprobs, sampled[:, None], axis=-1)
    if top == 0:
        return (chosen,)
    top = min(top, logprobs.shape[-1])
    likeliest = mx.argpartition(-logprobs, kth=top - 1, axis=-1)[:, :top]
    return chosen, likeliest, mx.take_along_axis(logprobs, likeliest, axis=-1)


def _read(pending: _Pending) -> Step:
    (token,) = cast("list[int]", pending.token.tolist())
    if pending.chosen is None:
        return Step(token, None)
    ((chosen,),) = cast("list[list[float]]", pending.chosen.tolist())
    top: list[tuple[int, float]] = []
    if pending.top_ids is not None and pending.top_logprobs is not None:
        (ids,) = cast("list[list[int]]", pending.top_ids.tolist())
        (values,) = cast("list[list[float]]", pending.top_logprobs.tolist())
        top = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return Step(token, TokenLogprob(token, chosen, tuple(top)))
