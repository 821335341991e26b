"""transition_d: which experts follow, d layers later in the same token, those that were chosen now.

Learned online from the router itself. Saved with the checkpoint's fingerprint by `titan.common.prediction.state`.
"""

from __future__ import annotations

import numpy as np

from titan.common.prediction.base import Routing

__all__ = ["Transition"]

PRIOR_USES = 4.0
EVIDENCE_WEIGHT = 0.5  # the chosen experts are not independent witnesses


class Transition:
    """Ranks by log P(j) + w sum_i log(P(j | i) / P(j)) over the experts i chosen `depth` positions before.

    `counts[l][i, j]`: tokens in which i was chosen at position l - depth and j at l; `uses[l][j]`: tokens that chose j
    at l. A depth of the number of layers predicts from the same layer at the token before.
    """

    name = "transition"
    needs_probabilities = False
    needs_probe = False
    needs_hidden = False

    def __init__(self, layers: int, num_experts: int, depth: int = 1) -> None:
        if not 1 <= depth <= layers:
            raise ValueError(f"a transition over {depth} of {layers} layers")
        self.depth = depth
        self.counts = np.zeros((layers, num_experts, num_experts), np.float32)
        self.uses = np.zeros((layers, num_experts), np.float32)
        self.steps = np.zeros(layers, np.float64)
        self._last: list[np.ndarray | None] = [None] * layers

    def observe(self, layer: int, routing: Routing) -> None:
        chosen = np.fromiter(routing.experts, np.intp)
        before = self._last[layer - self.depth]
        if before is not None:
            self.counts[layer][before[:, None], chosen] += 1
        self.uses[layer][chosen] += 1
        self.steps[layer] += 1
        self._last[layer] = chosen

    def rank(self, layer: int) -> np.ndarray:
        before = self._last[layer - self.depth]
        if before is None or not self.steps[layer]:
            return np.empty(0, np.intp)
        base = (self.uses[layer] + 0.1) / (self.steps[layer] + 1)
        rates = self.counts[layer][before] + PRIOR_USES * base
        rates /= self.uses[layer - self.depth][before, None] + PRIOR_USES
        score = np.log(base) + EVIDENCE_WEIGHT * np.log(rates / base).sum(axis=0)
        return np.argsort(-score, kind="stable")
