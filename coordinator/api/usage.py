"""Token counts in OpenAI's shape. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from titan.coordinator.generation import Usage

__all__ = ["usage_body"]


def usage_body(usages: Iterable[Usage]) -> dict[str, Any]:
    """The sum over the choices of one response."""
    counted = list(usages)
    prompt = sum(u.prompt_tokens for u in counted)
    cached = sum(u.cached_tokens for u in counted)
    completion = sum(u.completion_tokens for u in counted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
