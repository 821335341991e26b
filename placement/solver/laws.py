"""Laws of counts: how many of a layer's selected experts are at home, at workers, deeper, when all experts are ranked.

Knows routing weights, neither figures nor memory.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from titan.placement.routing import prefix_polynomials

Floats = NDArray[np.float64]


class Laws:
    """Polynomials of one kind of layer. Experts are ranked by weight; `u` counts from the least frequent upwards.

    Attributes:
        weights: descending. experts: E. total: e_K of all weights. flat: all weights are equal.
        head: [m, k] polynomial of the m most frequent. tail: [m, k] of the m least frequent.
        between: [u, x, k] of the u least frequent without the x least frequent; 0 where x > u.
        light, heavy: [m] summed weights of the m least and most frequent.
        comb: [n, k] binomials.
    """

    def __init__(self, weights: Floats, top_k: int) -> None:
        self.weights = np.sort(weights)[::-1]
        self.top_k, self.experts = top_k, len(weights)
        self.flat = bool(np.ptp(self.weights) == 0)
        self.head = prefix_polynomials(self.weights, top_k)
        self.tail = prefix_polynomials(self.weights[::-1], top_k)
        self.total = float(self.head[-1, top_k])
        self.light = np.concatenate([[0.0], np.cumsum(self.weights[::-1])])
        self.heavy = np.concatenate([[0.0], np.cumsum(self.weights)])
        self.comb = binomials(self.experts, top_k)
        self.between = self._between()

    def _between(self) -> Floats:
        count, top_k = self.experts, self.top_k
        out = np.zeros((count + 1, count + 1, top_k + 1))
        if self.flat:
            sizes = np.arange(count + 1)
            gap = sizes[:, None] - sizes[None, :]
            return np.where(gap[:, :, None] >= 0, self.comb[np.maximum(gap, 0)], 0.0)
        out[np.arange(count + 1), np.arange(count + 1), 0] = 1.0
        for size in range(1, count + 1):
            out[size, :size] = out[size - 1, :size]
            out[size, :size, 1:] += self.weights[count - size] * out[size - 1, :size, :-1]
        return out

    def crowding(self) -> Floats:
        """[u, x, k]: W^k / (k! e_k) of `between`, at least 1: by how much independent draws overrate distinct ones."""
        power = np.arange(self.top_k + 1)
        weight = np.maximum(self.light[:, None] - self.light[None, :], 0.0)
        drawn = weight[:, :, None] ** power / np.array([math.factorial(k) for k in power], dtype=np.float64)
        return np.divide(drawn, self.between, out=np.full_like(drawn, np.inf), where=self.between > 0)


def binomials(most: int, degree: int) -> Floats:
    """[n, k]: n over k."""
    return np.array([[math.comb(n, k) for k in range(degree + 1)] for n in range(most + 1)], dtype=np.float64)


def balanced_loads(comb: Floats, workers: int, top_k: int) -> Floats:
    """[q, r, kappa]: P(no worker has more than kappa | r selected of q dealt evenly to the workers).

    No other division of q equally frequent experts has a larger one (multivariate hypergeometric laws preserve Schur
    convexity).
    """
    count = len(comb)
    sizes, powers = np.arange(count), np.arange(top_k + 1)
    keep = powers[None, :] <= powers[:, None]  # [kappa, k]
    total = np.zeros((count, top_k + 1, top_k + 1))
    total[:, :, 0] = 1.0
    for i in range(workers):
        members = sizes // workers + (i < sizes % workers)
        term = comb[members][:, None, :] * keep[None]
        product = total * term[:, :, :1]
        for k in range(1, top_k + 1):
            product[:, :, k:] += total[:, :, : top_k + 1 - k] * term[:, :, k : k + 1]
        total = product
    below = np.swapaxes(total, 1, 2)
    return np.divide(below, comb[:, :, None], out=np.ones_like(below), where=comb[:, :, None] > 0)
