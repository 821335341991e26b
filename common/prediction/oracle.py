"""oracle: knows the trace. The most that any predictor could do at its depth; for simulation alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from titan.common.prediction.base import Routing

__all__ = ["Oracle"]


class Oracle:
    """Ranks exactly what comes next.

    Args:
        ids: [tokens, layers, K] of the trace that is replayed from its start.
    """

    name = "oracle"
    needs_probabilities = False
    needs_probe = False
    needs_hidden = False

    def __init__(self, ids: NDArray[np.integer], depth: int = 1) -> None:
        self.depth = depth
        self._ids = ids
        self._next = np.zeros(ids.shape[1], np.int64)

    def observe(self, layer: int, routing: Routing) -> None:  # noqa: ARG002
        self._next[layer] += 1

    def rank(self, layer: int) -> np.ndarray:
        token = self._next[layer]
        return self._ids[token, layer].astype(np.intp) if token < len(self._ids) else np.empty(0, np.intp)
