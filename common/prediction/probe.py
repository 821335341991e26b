"""probe: the router `depth` layers on, applied to this layer's hidden state.

The residual stream changes little from layer to layer, so the next router nearly knows already. Whoever runs the
model computes the logits; a learned head that maps the hidden state to logits is fed in the same way.
"""

from __future__ import annotations

import numpy as np

from titan.common.prediction.base import Routing

__all__ = ["Probe"]


class Probe:
    """Ranks by the logits that came with position l - depth."""

    name = "probe"
    needs_probabilities = False
    needs_probe = True
    needs_hidden = False

    def __init__(self, layers: int, depth: int = 1) -> None:
        self.depth = depth
        self._layers = layers
        self._logits: list[np.ndarray | None] = [None] * layers

    def observe(self, layer: int, routing: Routing) -> None:
        self._logits[(layer + self.depth) % self._layers] = routing.probe

    def rank(self, layer: int) -> np.ndarray:
        logits = self._logits[layer]
        return np.empty(0, np.intp) if logits is None else np.argsort(-logits, kind="stable")
