"""What a client asks of the generation engine, as values. Knows nothing of HTTP or MLX."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan.common.errors import ContextTooLong, InvalidRequest

__all__ = ["MAX_TOP_LOGPROBS", "GenerationRequest", "Sampling", "fit_max_tokens"]

MAX_TOP_LOGPROBS = 20
GREEDY_BELOW_TEMPERATURE = 1e-4  # 1 / temperature would leave float32 far before 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn from the model's distribution.

    Args:
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest; 0 drops none.
        seed: the same seed, request and model give the same tokens, whatever ran before; None draws a new one.
        presence_penalty: taken off the logit of every token that the answer has; OpenAI's definition.
        frequency_penalty: taken off as often as the answer has the token.
        repetition_penalty: divides (or multiplies, below 0) the logits of tokens that prompt or answer have; 1 is off.
        logit_bias: (token, added to its logit).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(f"{name} is {value}", f"give a number in {low:g}..{high:g}", param=name)
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise InvalidRequest(f"{name} is {getattr(self, name)}", "give a finite number", param=name)
        if self.repetition_penalty <= 0:
            raise InvalidRequest(
                f"repetition_penalty is {self.repetition_penalty}", "give more than 0", param="repetition_penalty"
            )
        if not all(math.isfinite(value) for _, value in self.logit_bias):
            raise InvalidRequest("logit_bias has a value that is not finite", "give numbers", param="logit_bias")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k is {self.top_k}", "give 0 or more", param="top_k")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_p == 0.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue.

    Args:
        prompt: token ids, at least one.
        max_tokens: tokens to generate at most, the end-of-text token counted.
        sampling: how tokens are drawn.
        stop: strings that end the answer; they and what follows are not part of it.
        top_logprobs: None for no log-probabilities, otherwise how many alternatives come with each token (0..20).
        grammar: what the answer has to be, in llguidance's terms; None for anything.
        ignore_end: go on after the end-of-text token, to `max_tokens`; for measurements.
        request_id: names the request in logs.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    grammar: str | None = None
    ignore_end: bool = False
    request_id: str = "-"

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("the prompt is empty", "give at least one token", param="prompt")
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {self.max_tokens}", "give 1 or more", param="max_tokens")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}", f"give 0..{MAX_TOP_LOGPROBS}", param="top_logprobs"
            )
        if not all(self.stop):
            raise InvalidRequest("a stop string is empty", "give text that can occur", param="stop")


def fit_max_tokens(
    prompt_tokens: int,
    max_tokens: int | None,
    context_tokens: int,
    *,
    default: int | None = None,
    param: str = "messages",
) -> int:
    """How many tokens an answer may have so that prompt and answer fit the context.

    Args:
        prompt_tokens: length of the prompt.
        max_tokens: what the client asked for; None takes what fits, at most `default`.
        context_tokens: what the model holds.
        param: the request's field that holds the prompt, for the error.

    Raises:
        ContextTooLong: the prompt alone fills the context, or prompt and `max_tokens` exceed it.
    """
    room = context_tokens - prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and the model's context is {context_tokens} tokens",
            f"shorten the prompt to at most {context_tokens - 1} tokens",
            param=param,
        )
    if max_tokens is None:
        return room if default is None else min(room, default)
    if max_tokens > room:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: "
            f"together more than the model's context of {context_tokens} tokens",
            f"with this prompt max_tokens can be at most {room}",
            param=param,
        )
    return max_tokens
