"""How often, and how soon again, routers chose each expert of the layers that ask, since serving began. Knows no plan.

A layer that is wholly at home never asks, and what its router chooses changes nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from titan.placement.reuse import Reuse, ReuseCounts, over_layers

KEPT_ROWS = 256  # of a layer, looked at together: one by one would cost time in every layer


class RoutingCounts:
    """Counted by the engine's thread, read by any.

    Args:
        layers: the model's numbers of its MoE layers.
        top_k: experts a row.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, top_k: int) -> None:
        self._positions = {layer: position for position, layer in enumerate(layers)}
        self._num_experts = num_experts
        self._counts = np.zeros((len(layers), num_experts), np.int64)
        self._rows = np.zeros(len(layers), np.int64)
        self._recent = np.zeros((len(layers), KEPT_ROWS, top_k), np.int64)
        self._filled = [0] * len(layers)
        self._reuse = [ReuseCounts(num_experts, top_k) for _ in layers]

    def saw(self, layer: int, experts: np.ndarray) -> None:
        """experts: [N, K] the router's choice for N rows."""
        position = self._positions[layer]
        self._counts[position] += np.bincount(experts.reshape(-1), minlength=self._num_experts)
        self._rows[position] += experts.shape[0]
        if experts.shape[0] == 1:  # rows that run together are not one after another
            self._recent[position, self._filled[position]] = experts[0]
            self._filled[position] += 1
            if self._filled[position] == KEPT_ROWS:
                self._filled[position] = 0
                self._reuse[position].add(self._recent[position])

    def total(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """([layers, E] choices, [layers] rows) so far, copied."""
        return self._counts.copy(), self._rows.copy()

    def reuse(self) -> Reuse | None:
        """From row to row while one sequence was decoded, per MoE layer; None when that is not known yet. A layer that
        did not ask gets what the others have on the mean."""
        return over_layers([counts.fresh() for counts in self._reuse])
