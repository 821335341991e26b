"""How much memory node 0 may give to experts (M_0), and how long a context its KV cache is planned for.

Pure arithmetic over a checkpoint's figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.errors import MemoryBudgetError
from titan.common.registry import Checkpoint
from titan.common.units import format_bytes
from titan.coordinator.generation.room import GROWTH_TOKENS

MAX_CONTEXT_TOKENS = 32_768  # default limit: a KV cache is reserved in full
SEQUENCES = 8  # of a short context, KV is planned for so many, within MAX_CONTEXT_TOKENS
RESERVE_BYTES = 300 << 20  # interpreter's heap, temporaries of a forward pass, reader buffers


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Node 0's bytes: M_0 for experts, and what it needs besides."""

    experts_bytes: int
    non_expert_bytes: int
    kv_bytes: int
    context_tokens: int
    kv_tokens: int


def host_memory(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    available_bytes: int,
    experts_bytes: int | None,
    context: int | None,
    prompt_cache_bytes: int = 0,
) -> HostMemory:
    """Split the machine's memory.

    Args:
        available_bytes: what this process may use in all.
        experts_bytes: M_0 when the user states it; otherwise what is left.
        context: most tokens of prompt and answer; None takes the model's own limit, at most MAX_CONTEXT_TOKENS.
        prompt_cache_bytes: what prompts may keep in memory.

    Raises:
        MemoryBudgetError: nothing is left for experts.
    """
    own = _number(checkpoint, "max_position_embeddings") or 4096
    tokens = min(own, context or MAX_CONTEXT_TOKENS)
    kv_tokens = max(tokens, min(SEQUENCES * tokens, MAX_CONTEXT_TOKENS)) + SEQUENCES * GROWTH_TOKENS
    kv_bytes = kv_tokens * kv_bytes_per_token(checkpoint, dtype) + prompt_cache_bytes
    non_expert = non_expert_bytes(checkpoint, dtype)
    if experts_bytes is None:
        experts_bytes = available_bytes - non_expert - kv_bytes - RESERVE_BYTES
        if experts_bytes <= 0:
            raise MemoryBudgetError(
                f"this machine can spare {format_bytes(available_bytes)}; the model without experts needs "
                f"{format_bytes(non_expert)}, the KV cache of {kv_tokens} tokens {format_bytes(kv_bytes)}",
                "close other programs, or shorten --context",
            )
    return HostMemory(experts_bytes, non_expert, kv_bytes, tokens, kv_tokens)


def kv_bytes_per_token(checkpoint: Checkpoint, dtype: str) -> int:
    """Keys and values of all layers for one token."""
    return checkpoint.shape.num_layers * checkpoint.cache_width * COMPUTE_DTYPES[dtype][1].size


def non_expert_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes of everything but experts once loaded: 16-bit floats widen where we compute in float32."""
    widen = 2 if dtype == "float32" else 1
    return sum(
        math.prod(t.shape) * 2 * widen if t.dtype in ("BF16", "F16") else t.nbytes
        for t in checkpoint.non_expert_tensors
    )


def _number(checkpoint: Checkpoint, key: str) -> int | None:
    value = checkpoint.config.get(key)
    return value if isinstance(value, int) else None
