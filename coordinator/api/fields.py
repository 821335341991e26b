"""Fields of OpenAI's requests that Titan does not act on: which are harmless and which would change the answer.

A field that nobody knows is refused as OpenAI refuses it: a misspelt `temprature` should not pass in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan.common.errors import InvalidRequest

__all__ = ["check_other_fields"]

HARMLESS = frozenset(
    {
        "betas",
        "cache_control",
        "include",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Not supported; each with the values that mean the same as leaving it out.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "conversation": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "previous_response_id": (),
    "prompt": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def check_other_fields(fields: Mapping[str, Any]) -> None:
    """Pass what is null, harmless or neutral; raise InvalidRequest, naming the field, for everything else."""
    for name, value in fields.items():
        if value is None or name in HARMLESS:
            continue
        neutral = NEUTRAL_VALUES.get(name)
        if neutral is None:
            raise InvalidRequest(f"{name[:80]} is not a field of this request", "leave it out", param=name[:80])
        if not any(type(value) is type(other) and value == other for other in neutral):
            accepted = " or ".join(repr(other) for other in neutral)
            raise InvalidRequest(
                f"{name} would change the answer and is not supported",
                f"leave it out{f' or send {accepted}' if accepted else ''}",
                param=name,
            )
