"""What the engine tells about a request while it runs, as values. Knows nothing of HTTP or MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "FinishReason", "Finished", "TextDelta", "Timings", "TokenLogprob", "Usage"]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the model's probability (before temperature and filters) of a token and of the likeliest.

    Args:
        token: the token that was chosen.
        logprob: its log-probability.
        top: the likeliest tokens, best first, as (token, log-probability).
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is final, the tokens behind it, and their log-probabilities if those were asked for.

    A text that is held back (half a character, the beginning of a stop string) travels with the tokens that made it.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached_tokens` of the prompt were not run, their KV was known."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a request spent waiting, up to its first token, and from there to its last."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that did not fail; `stop_string` is the one of the request's that ended it."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_string: str | None = None


Event = TextDelta | Finished
