"""How the router is expected to choose: the K-subset distribution of largest entropy with given expert frequencies.

P(S) is proportional to the product of the weights of S (a conditional Bernoulli design); equal weights make it the
uniform distribution over K-subsets. How many experts of a group are selected then depends on elementary symmetric
polynomials of the group's weights alone. It knows neither nodes nor costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MIN_FREQUENCY = 1e-5
LANES = 8  # parts of a large group multiplied side by side


def group_polynomial(weights: Sequence[float] | Floats, degree: int) -> Floats:
    """e_0..e_degree of the weights: coefficients of prod (1 + w x). [degree + 1]"""
    out = np.zeros(degree + 1)
    out[0] = 1.0
    if len(weights) and np.ptp(weights) == 0:
        w, n = float(weights[0]), len(weights)
        for k in range(1, min(degree, n) + 1):
            out[k] = math.comb(n, k) * w**k
        return out
    if len(weights) < 4 * LANES:
        for w in weights:
            out[1:] += w * out[:-1]
        return out
    lanes = np.zeros((LANES, -(-len(weights) // LANES)))
    lanes.ravel()[: len(weights)] = weights
    parts = np.zeros((LANES, degree + 1))
    parts[:, 0] = 1.0
    for column in lanes.T:
        parts[:, 1:] += column[:, None] * parts[:, :-1]
    for part in parts:
        out = np.convolve(out, part)[: degree + 1]
    return out


def prefix_polynomials(weights: Floats, degree: int) -> Floats:
    """e_k of the first i weights. [len + 1, degree + 1]"""
    out = np.zeros((len(weights) + 1, degree + 1))
    out[0, 0] = 1.0
    for i, w in enumerate(weights):
        out[i + 1] = out[i]
        out[i + 1, 1:] += w * out[i, :-1]
    return out


def count_distribution(tail: Floats, head: Floats, top_k: int) -> Floats:
    """P(r experts of the tail group are selected), r = 0..K, from both groups' polynomials [..., K + 1]."""
    joint = tail * head[..., ::-1][..., : top_k + 1]
    return joint / joint.sum(axis=-1, keepdims=True)


def inclusion(weights: Floats, top_k: int) -> Floats:
    """How often each expert is selected under the weights; sums to K."""
    before = prefix_polynomials(weights, top_k)
    after = prefix_polynomials(weights[::-1], top_k)[::-1]
    without = np.einsum("ej,ej->e", before[:-1, :top_k], after[1:, :top_k][:, ::-1])
    return weights * without / before[-1, top_k]


def weights_from_frequencies(frequencies: Sequence[float] | Floats, top_k: int, *, rounds: int = 60) -> Floats:
    """Weights whose inclusion probabilities are the given frequencies, mean 1. Flat frequencies give exactly 1."""
    target = np.asarray(frequencies, dtype=np.float64)
    if top_k >= len(target) or np.ptp(target) < 1e-12:
        return np.ones(len(target))
    target = np.clip(target, MIN_FREQUENCY, 1 - MIN_FREQUENCY)
    target = target * (top_k / target.sum())
    target = np.minimum(target, 1 - MIN_FREQUENCY)
    weights = target / (1 - target)
    weights /= weights.mean()
    for _ in range(rounds):
        got = inclusion(weights, top_k)
        step = target * (1 - got) / (np.maximum(got, 1e-300) * (1 - target))
        weights = weights * step
        weights /= weights.mean()
        if np.max(np.abs(got - target)) < 1e-9:
            break
    return weights


def sample(weights: Floats, top_k: int, rows: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`rows` independent draws of K distinct experts, ascending ids. [rows, K]"""
    after = prefix_polynomials(weights[::-1], top_k)[::-1]
    left = np.full(rows, top_k)
    out = np.empty((rows, top_k), dtype=np.int64)
    uniform = rng.random((len(weights), rows))
    for expert, w in enumerate(weights):
        total = after[expert, left]
        take = np.where(left > 0, w * after[expert + 1, np.maximum(left - 1, 0)], 0.0)
        chosen = (uniform[expert] * total < take) & (left > 0)
        out[chosen, top_k - left[chosen]] = expert
        left = left - chosen
    return out


def zipf_layers(
    layers: int, num_experts: int, top_k: int, exponent: float, seed: int = 0
) -> tuple[tuple[float, ...], ...]:
    """`zipf_frequencies` for every layer, each in an order of its own."""
    row, rng = zipf_frequencies(num_experts, top_k, exponent), np.random.default_rng(seed)
    return tuple(tuple(rng.permutation(row).tolist()) for _ in range(layers))


def zipf_frequencies(num_experts: int, top_k: int, exponent: float) -> Floats:
    """Frequencies, descending, of the routing model with weights i^-exponent; sums to K."""
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    return inclusion(weights / weights.mean(), top_k)
