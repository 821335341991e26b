"""Experts applied to activations: the same kernels in the same order as mlx-lm's SwitchGLU, on slots.

Every (row, expert) pair is computed independently of every other, which is what lets Titan split, chunk and
distribute them without changing a bit on CPU. Knows slots, not experts' whereabouts.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU

from titan.common.slots.buffers import LayerBuffers

SORT_AT_PAIRS = 64  # mlx-lm sorts by expert from this many pairs on

_ACTIVATIONS = {"silu": SwiGLU(), "gpt_oss": SwigluOAI()}  # by LayerSpec.activation


def apply_rows(buffers: LayerBuffers, x: mx.array, slots: mx.array) -> mx.array:
    """x: [..., D], slots: [..., K] -> y: [..., K, D]: mlx-lm's own call with slot ids for expert ids."""
    return _apply(buffers, x, slots, slots.size >= SORT_AT_PAIRS)


def apply_pairs(buffers: LayerBuffers, x: mx.array, rows: np.ndarray, slots: np.ndarray, *, sort: bool) -> mx.array:
    """One output a (row, slot) pair.

    Args:
        x: [R, D] activations.
        rows, slots: [P] of uint32: pair i is row `rows[i]` through the expert in slot `slots[i]`.
        sort: whether mlx-lm would sort in the whole layer (its kernels on Metal differ in the last bits).

    Returns:
        [P, D], unevaluated.
    """
    y = _apply(buffers, x[mx.array(rows)], mx.array(slots)[:, None], sort)
    return y.squeeze(-2)


def _apply(buffers: LayerBuffers, x: mx.array, slots: mx.array, sort: bool) -> mx.array:
    shape = slots.shape
    x = mx.expand_dims(x, (-2, -3))
    inverse = None
    if sort:
        flat = slots.flatten()
        order = mx.argsort(flat)
        inverse = mx.argsort(order)
        x, slots = x.flatten(0, -3)[order // shape[-1]], flat[order]
    up = buffers.up(x, slots, sort)
    gate = buffers.gate(x, slots, sort)
    y = buffers.down(_ACTIVATIONS[buffers.layer.activation](up, gate), slots, sort)
    if inverse is not None:
        y = mx.unflatten(y[inverse], 0, shape)
    return y.squeeze(-2)
