"""What every predictor is: it observes layers in the order they run and ranks experts for a layer to come.

Layers are positions 0..L-1 among the MoE layers; position l - d before the first layer is the end of the token
before. Learned heads fit the same form: they are fed `hidden` and `choices` and rank from them; one that speaks of the
next token has depth L. Knows no slots and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["Predictor", "Routing"]


@dataclass(frozen=True, slots=True)
class Routing:
    """What is known once a layer has routed one token (or one step of a batch).

    Args:
        experts: the distinct experts chosen (S_{t,l}).
        probabilities: [E] the router's, summed over rows; None when nobody asked for them.
        probe: [E] the logits of the router `depth` layers on, applied to this layer's hidden state; None likewise.
        hidden: [N, D] this layer's MoE input (after the norm), float32, a row a token; None likewise.
        choices: [N, K] what the router chose for each row.
    """

    experts: Sequence[int]
    probabilities: np.ndarray | None = None
    probe: np.ndarray | None = None
    hidden: np.ndarray | None = None
    choices: np.ndarray | None = None


class Predictor(Protocol):
    """Ranks experts for the next execution of a layer.

    Attributes:
        name: as options and tables call it.
        depth: layers of lead (d): what was observed at position l - depth decides the rank for l.
        needs_probabilities, needs_probe, needs_hidden: which fields of `Routing` it reads.
    """

    name: str
    depth: int
    needs_probabilities: bool
    needs_probe: bool
    needs_hidden: bool

    def observe(self, layer: int, routing: Routing) -> None:
        """The router at position `layer` has chosen."""

    def rank(self, layer: int) -> np.ndarray:
        """Expert ids for the next execution of position `layer`, likeliest first; shorter than E, even empty, when
        that is all it knows."""
        ...
