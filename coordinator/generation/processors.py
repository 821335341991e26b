"""What a request asks to be changed about its logits: biases, penalties, a form of answer. Knows no model."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx

from titan.coordinator.generation.batch import LogitsProcessor
from titan.coordinator.generation.grammar import GrammarProcessor, Grammars
from titan.coordinator.generation.request import GenerationRequest, Sampling

__all__ = ["Bias", "Penalties", "make_processors"]


def make_processors(request: GenerationRequest, grammars: Grammars) -> list[LogitsProcessor]:
    """In the order in which they act: penalties, biases, and the grammar, which has the last word.

    Raises:
        InvalidRequest: the grammar cannot be followed.
    """
    sampling = request.sampling
    found: list[LogitsProcessor] = []
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
        found.append(Penalties(sampling, request.prompt))
    if sampling.logit_bias:
        found.append(Bias(sampling.logit_bias))
    if request.grammar is not None:
        found.append(GrammarProcessor(grammars, request.grammar))
    return found


class Bias:
    """Adds to the logits of some tokens."""

    needs_tokens = False

    def __init__(self, bias: tuple[tuple[int, float], ...]) -> None:
        self._tokens = mx.array([token for token, _ in bias])
        self._values = mx.array([value for _, value in bias])

    def __call__(self, logits: mx.array) -> mx.array:
        return logits.at[:, self._tokens].add(self._values.astype(logits.dtype))

    def accept(self, token: int) -> None:
        pass


class Penalties:
    """Presence and frequency penalties count the answer's tokens, as OpenAI's do; the repetition penalty
    (https://arxiv.org/abs/1909.05858) counts the prompt's too."""

    needs_tokens = True

    def __init__(self, sampling: Sampling, prompt: tuple[int, ...]) -> None:
        self._sampling = sampling
        self._counts: Counter[int] = Counter()
        self._seen = set(prompt) if sampling.repetition_penalty != 1.0 else set()

    def __call__(self, logits: mx.array) -> mx.array:
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0 and self._seen:
            tokens = mx.array(sorted(self._seen))
            own = logits[:, tokens]
            penalty = sampling.repetition_penalty
            logits = mx.put_along_axis(
                logits, tokens[None], mx.where(own < 0, own * penalty, own / penalty).astype(logits.dtype), axis=-1
            )
        if self._counts and (sampling.presence_penalty or sampling.frequency_penalty):
            tokens = mx.array(list(self._counts))
            counts = mx.array(list(self._counts.values()), dtype=logits.dtype)
            logits = logits.at[:, tokens].subtract(sampling.presence_penalty + sampling.frequency_penalty * counts)
        return logits

    def accept(self, token: int) -> None:
        self._counts[token] += 1
        if self._sampling.repetition_penalty != 1.0:
            self._seen.add(token)
