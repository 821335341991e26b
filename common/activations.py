"""What stands between an expert's up and gate projections and its down projection, by `LayerSpec.activation`.

The expressions of mlx-lm's `models/activations.py`, compiled as there, so that the bits are the same; here because a
process that only executes experts would otherwise import all of mlx-lm and transformers (a test compares).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
from mlx import nn

__all__ = ["ACTIVATION"]

GPT_OSS_SLOPE = 1.702
GPT_OSS_LIMIT = 7.0


@partial(mx.compile, shapeless=True)
def _silu(up: mx.array, gate: mx.array) -> mx.array:
    return nn.silu(gate) * up


@partial(mx.compile, shapeless=True)
def _gpt_oss(up: mx.array, gate: mx.array) -> mx.array:
    """The gate clipped from above, the linear part clipped and raised by one."""
    gate = mx.minimum(gate, GPT_OSS_LIMIT)
    up = mx.clip(up, -GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    return (up + 1.0) * (gate * mx.sigmoid(GPT_OSS_SLOPE * gate))


# (up, gate) -> what `down` is given, all of one shape and dtype
ACTIVATION: dict[str, Callable[[mx.array, mx.array], mx.array]] = {"silu": _silu, "gpt_oss": _gpt_oss}
