"""How likely a layer's selected experts find room at their holders in time, and how fast that changes with the shares.

A node's share of a layer is the weight of the experts it alone holds. By an instant node n can run r_n of them, so the
chance that a row is done is at most a polynomial in the shares, sum over k <= r, |k| = K, of prod_n e_{k_n}, and
Maclaurin bounds e_k of m experts with weight x by x^k / k! prod_{i<k} (1 - i/m). With log-concave factors such a
polynomial is Lorentzian (Braenden and Huh 2020): its K-th root is concave in the shares. It knows rooms and weights, no
prices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fitting:
    """Pieces of time and the rooms in them.

    Args:
        length_s: [pieces] seconds.
        room: [pieces, columns] experts every column can have run; a column is a node, or experts of another kind.
        top_k: K. total: e_K of all weights.
    """

    length_s: Floats
    room: Ints
    top_k: int
    total: float

    def chances(self, share: Floats, most: Floats) -> tuple[Floats, Floats]:
        """([pieces, cells] bound on the chance to be done, [columns, pieces, cells] its derivatives by the shares).

        Args:
            share: [columns, cells]. most: [columns, cells] at most so many experts make up a share.
        """
        columns, size = len(share), self.top_k + 1
        terms, lowered = [], []
        for n in range(columns):
            powers, slopes = _powers(share[n], most[n], size)
            fits = np.arange(size)[:, None] <= self.room[None, :, n]  # [k, pieces]
            fits = fits[: 1 + int(self.room[:, n].max(initial=0))]
            terms.append(fits[:, :, None] * powers[: len(fits), None, :])
            lowered.append(fits[1:, :, None] * slopes[1 : len(fits), None, :])
        after = [terms[-1]] * columns
        for n in range(columns - 2, -1, -1):
            after[n] = _multiply(terms[n], after[n + 1], size)
        value = _last(after[0], self.top_k) / self.total
        gradient = np.zeros((columns, *value.shape))
        before: Floats | None = None
        for n in range(columns):
            if len(lowered[n]):
                left = lowered[n] if before is None else _multiply(before, lowered[n], size - 1)
                gradient[n] = (
                    _joined(left, after[n + 1], self.top_k - 1) if n + 1 < columns else _last(left, self.top_k - 1)
                ) / self.total
            before = terms[n] if before is None else _multiply(before, terms[n], size)
        return value, gradient


def _powers(share: Floats, most: Floats, size: int) -> tuple[Floats, Floats]:
    """([k, cells] bound on e_k, [k, cells] its derivative by the share)."""
    powers, slopes = np.zeros((size, len(share))), np.zeros((size, len(share)))
    powers[0] = 1.0
    for k in range(1, size):
        factor = np.maximum(1.0 - (k - 1) / np.maximum(most, 1e-300), 0.0)
        slopes[k] = powers[k - 1] * factor if k == 1 else slopes[k - 1] * share / (k - 1) * factor
        powers[k] = powers[k - 1] * share / k * factor
    return powers, slopes


def _multiply(left: Floats, right: Floats, size: int) -> Floats:
    """Product of polynomials [degree, ...], cut to `size` coefficients."""
    out = np.zeros((min(size, len(left) + len(right) - 1), *left.shape[1:]))
    for i in range(len(left)):
        for j in range(min(len(right), len(out) - i)):
            out[i + j] += left[i] * right[j]
    return out


def _joined(left: Floats, right: Floats, degree: int) -> Floats:
    """Coefficient `degree` of a product."""
    out = np.zeros(left.shape[1:])
    for i in range(max(0, degree - len(right) + 1), min(len(left), degree + 1)):
        out += left[i] * right[degree - i]
    return out


def _last(polynomial: Floats, degree: int) -> Floats:
    return polynomial[degree] if len(polynomial) > degree else np.zeros(polynomial.shape[1:])
