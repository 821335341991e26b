"""Whether routing has drifted from what a plan was made for: total variation between frequencies, over a window.

Pure but for the window it keeps. Knows counts of a model's layers; not where they come from, nor what a plan is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Frequencies = tuple[tuple[float, ...], ...]

LOOKS_KEPT = 20
ENOUGH_ROWS = 256  # fewer say nothing about a layer
DRIFTED = 0.15  # of a layer's choices would have to go to other experts, beyond what chance does, on the mean of layers


def total_variation(planned: Floats, seen: Floats) -> Floats:
    """[layers]: share of a layer's choices that went to other experts than planned. Both [layers, E], summing to K."""
    return 0.5 * np.abs(planned - seen).sum(axis=1) / np.maximum(planned.sum(axis=1), 1e-12)


def chance_variation(planned: Floats, rows: Ints) -> Floats:
    """[layers]: the total variation that `rows` draws from `planned` itself are expected to show, at most.

    The mean of |count - n p| is below its standard deviation, sqrt(n p (1 - p)).
    """
    deviation = np.sqrt(planned * np.clip(1 - planned, 0, 1)).sum(axis=1) / np.sqrt(np.maximum(rows, 1))
    return 0.5 * deviation / np.maximum(planned.sum(axis=1), 1e-12)


class RoutingDrift:
    """A sliding window over what routers chose, against what the plan expects.

    Args:
        frequencies: [layers][E] the plan was made for, each layer summing to K; None: every expert equally often.
    """

    def __init__(self, layers: int, num_experts: int, top_k: int, frequencies: Frequencies | None) -> None:
        self._top_k = top_k
        self._looks: deque[tuple[Ints, Ints]] = deque(maxlen=LOOKS_KEPT)
        self._last: tuple[Ints, Ints] = (np.zeros((layers, num_experts), np.int64), np.zeros(layers, np.int64))
        flat = np.full((layers, num_experts), top_k / num_experts)
        self._planned = flat if frequencies is None else np.array(frequencies, np.float64)

    def look(self, counts: Ints, rows: Ints) -> None:
        """Take in totals since serving began: [layers, E] choices and [layers] rows."""
        self._looks.append((counts - self._last[0], rows - self._last[1]))
        self._last = counts, rows

    def drift(self) -> float:
        """Mean over the layers with enough rows of their total variation beyond chance; 0 while nothing is known."""
        counts, rows = self._window()
        known = rows >= ENOUGH_ROWS
        if not known.any():
            return 0.0
        planned, seen = self._planned[known], counts[known] / rows[known, None]
        beyond = total_variation(planned, seen) - chance_variation(planned, rows[known])
        return float(np.mean(np.maximum(beyond, 0.0)))

    @property
    def drifted(self) -> bool:
        return self.drift() > DRIFTED

    def seen(self) -> Frequencies:
        """Frequencies to plan for now: what was seen where enough was, what the plan expects elsewhere."""
        counts, rows = self._window()
        out = self._planned.copy()
        for layer in np.flatnonzero(rows >= ENOUGH_ROWS):
            out[layer] = counts[layer] / rows[layer]
            out[layer] *= self._top_k / out[layer].sum()
        return tuple(tuple(row) for row in np.minimum(out, 1.0).tolist())

    def planned_for(self, frequencies: Frequencies | Sequence[Sequence[float]]) -> None:
        """From now on, drift is measured from these."""
        self._planned = np.array(frequencies, np.float64)

    def _window(self) -> tuple[Ints, Ints]:
        if not self._looks:
            return np.zeros_like(self._last[0]), np.zeros_like(self._last[1])
        return sum(c for c, _ in self._looks), sum(r for _, r in self._looks)  # type: ignore[return-value]
