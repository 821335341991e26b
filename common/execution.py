"""Experts applied to activations: the same kernels in the same order as mlx-lm's SwitchGLU, on slots.

Every (row, expert) pair is computed independently of every other, which is what lets Titan split, chunk and
distribute them without changing a bit on CPU. Knows slots, not experts' whereabouts.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from titan.common.activations import ACTIVATION
from titan.common.slots.buffers import LayerBuffers

SORT_AT_PAIRS = 64  # mlx-lm sorts by expert from this many pairs on


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


def weighted_sums(y: mx.array, rows: np.ndarray, scores: np.ndarray, count: int) -> mx.array:
    """For each of `count` rows the sum over its pairs of score times output, in float32 and in the order of the pairs.

    Args:
        y: [P, D] outputs.
        rows: [P], each < count.
        scores: [P] of float32.

    Returns:
        [count, D] of float32, unevaluated; zeros for a row without pairs.
    """
    if count == 1:
        return (y.astype(mx.float32) * mx.array(scores)[:, None]).sum(axis=0, keepdims=True)
    order = np.argsort(rows, kind="stable")
    pairs_of = np.bincount(rows, minlength=count)
    width = int(pairs_of.max())
    # A table [count, width] of each row's pairs; where a row has fewer, weight 0.
    places = np.arange(rows.size) - np.repeat(np.cumsum(pairs_of) - pairs_of, pairs_of)
    pair = np.zeros((count, width), np.uint32)
    weight = np.zeros((count, width), np.float32)
    pair[rows[order], places] = order
    weight[rows[order], places] = scores[order]
    return (y[mx.array(pair)].astype(mx.float32) * mx.array(weight)[..., None]).sum(axis=-2)


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
    y = buffers.down(ACTIVATION[buffers.layer.activation](up, gate), slots, sort)
    if inverse is not None:
        y = mx.unflatten(y[inverse], 0, shape)
    return y.squeeze(-2)
