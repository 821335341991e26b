"""A layer's pairs executed expert group by expert group, whatever buffers a group lies in, and joined again.

Pairs are independent, so the result is that of one call. Knows slots, not how experts come into them.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from titan.common.execution import apply_pairs
from titan.common.slots.buffers import LayerBuffers

__all__ = ["PairGroups"]


class PairGroups:
    """x: [R, D], rows and experts: [P]; `sort` as in apply_pairs."""

    def __init__(self, x: mx.array, rows: np.ndarray, experts: np.ndarray, *, sort: bool) -> None:
        self.experts = experts
        self.outputs: list[mx.array] = []
        self._x = x
        self._rows = rows
        self._sort = sort
        self._positions: list[np.ndarray] = []

    def apply(self, buffers: LayerBuffers, places: Mapping[int, int]) -> mx.array:
        """Begin to evaluate the pairs of the experts in `places` (expert -> slot of `buffers`): [p, D]."""
        chosen = np.flatnonzero(np.isin(self.experts, list(places)))
        slots = np.array([places[e] for e in self.experts[chosen].tolist()], np.uint32)
        y = apply_pairs(buffers, self._x, self._rows[chosen], slots, sort=self._sort)
        mx.async_eval(y)
        self.outputs.append(y)
        self._positions.append(chosen)
        return y

    def joined(self) -> mx.array:
        """[P, D] in the order of the pairs; every expert has been applied once."""
        order = np.argsort(np.concatenate(self._positions)).astype(np.uint32)
        return mx.concatenate(self.outputs)[mx.array(order)]
