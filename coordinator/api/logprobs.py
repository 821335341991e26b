"""Log-probabilities in OpenAI's two shapes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan.coordinator.generation import TokenLogprob
from titan.coordinator.generation.vocabulary import Vocabulary

__all__ = ["chat_logprobs", "completion_logprobs"]

LOWEST_LOGPROB = -9999.0  # what OpenAI sends for a token that cannot occur; JSON has no -inf


def chat_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": null}`."""
    content = [
        _entry(vocabulary, entry.token, entry.logprob)
        | {"top_logprobs": [_entry(vocabulary, token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`.

    Args:
        text_offset: characters of the answer before the first entry.
    """
    tokens = [vocabulary.token_text(entry.token) for entry in entries]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    top: list[dict[str, float]] = []
    for entry in entries:
        likeliest: dict[str, float] = {}
        for token, logprob in entry.top:  # best first: of two tokens with one text the better counts
            likeliest.setdefault(vocabulary.token_text(token), _finite(logprob))
        top.append(likeliest)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _entry(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    data = vocabulary.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
