"""Draws the next token, with randomness that belongs to one request.

mlx-lm's filters do the work; only the last draw is ours, because mlx-lm takes its key from the process-wide state,
which requests would share. With the same seed the tokens equal those of `mx.random.seed(seed)` and mlx-lm's sampler.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler

from titan.coordinator.generation.request import Sampling

__all__ = ["Sampler", "make_sampler"]

Sampler = Callable[[mx.array], mx.array]


def make_sampler(sampling: Sampling) -> Sampler:
    """A function from log-probabilities [rows, vocabulary] to tokens [rows]. Stateful: one a request.

    The order is mlx-lm's: top-p, min-p and top-k on the plain distribution, then the draw at the temperature.
    """
    if sampling.greedy:
        return greedy_sampler
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64
    key = mx.random.key(seed)
    inverse_temperature = 1.0 / sampling.temperature

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal key
        if sampling.top_p < 1.0:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        if sampling.min_p > 0.0:
            logprobs = apply_min_p(logprobs, sampling.min_p)
        if 0 < sampling.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        key, draw = mx.random.split(key)
        return mx.random.categorical(logprobs * inverse_temperature, key=draw)

    return sample
