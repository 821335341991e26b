"""prev-rank: what the token before chose in the same layer, then whom its router nearly chose.

Needs nothing but the last token, so that it can speak any number of layers ahead.
"""

from __future__ import annotations

import numpy as np

from titan.common.prediction.base import Routing

__all__ = ["PreviousToken"]


class PreviousToken:
    """Ranks by the previous token's router probability; without probabilities, the chosen ones in their order."""

    name = "previous"
    needs_probe = False
    needs_hidden = False

    def __init__(self, layers: int, depth: int = 1, *, probabilities: bool = True) -> None:
        self.depth = depth
        self.needs_probabilities = probabilities
        self._ranks = [np.empty(0, np.intp) for _ in range(layers)]

    def observe(self, layer: int, routing: Routing) -> None:
        if routing.probabilities is not None:
            self._ranks[layer] = np.argsort(-routing.probabilities, kind="stable")
        else:
            self._ranks[layer] = np.fromiter(routing.experts, np.intp)

    def rank(self, layer: int) -> np.ndarray:
        return self._ranks[layer]
