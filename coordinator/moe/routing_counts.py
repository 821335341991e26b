"""How often the router chose each expert of the layers that ask, since serving began. Knows no plan.

A layer that is wholly at home never asks, and what its router chooses changes nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class RoutingCounts:
    """Counted by the engine's thread, read by any.

    Args:
        layers: the model's numbers of its MoE layers.
    """

    def __init__(self, layers: Sequence[int], num_experts: int) -> None:
        self._positions = {layer: position for position, layer in enumerate(layers)}
        self._num_experts = num_experts
        self._counts = np.zeros((len(layers), num_experts), np.int64)
        self._rows = np.zeros(len(layers), np.int64)

    def saw(self, layer: int, experts: np.ndarray) -> None:
        """experts: [N, K] the router's choice for N rows."""
        position = self._positions[layer]
        self._counts[position] += np.bincount(experts.reshape(-1), minlength=self._num_experts)
        self._rows[position] += experts.shape[0]

    def total(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """([layers, E] choices, [layers] rows) so far, copied."""
        return self._counts.copy(), self._rows.copy()
