"""What layers and steps take, read from the clock and from what the slot tables count as stall.

Feeds `Measures`. Knows neither predictors nor what is read.
"""

from __future__ import annotations

from collections.abc import Callable

from titan.common.experts import ExpertLayer
from titan.common.prefetch.measures import Measures

__all__ = ["StepClock"]


class StepClock:
    """Of one model's MoE layers, in the order they run.

    Attributes:
        layers: replaced in place when a layer gets other slots.
    """

    def __init__(self, layers: list[ExpertLayer], measures: Measures, clock: Callable[[], float]) -> None:
        self.layers = layers
        self._measures = measures
        self._clock = clock
        self._stalled = [(0.0, 0.0, 0)] * len(layers)
        self._last: float | None = None  # when the layer before had routed
        self._flying = 0  # prefetches under way since then
        self._begun = 0  # of them, begun then
        self._entered: float | None = None  # when the step came to its first layer
        self._stall_before = 0.0

    def enter(self) -> None:
        """A step comes to its first layer."""
        self._entered = self._clock()
        self._stall_before = self._stall_s()

    def step(self) -> tuple[float, float] | None:
        """(seconds, of them stall) since the first layer was entered; None when that was not seen."""
        entered, self._entered = self._entered, None
        return None if entered is None else (self._clock() - entered, self._stall_s() - self._stall_before)

    def reached(self, position: int) -> None:
        """A layer has routed, and what it needed is in memory: take note of what came since the layer before."""
        counts = self.layers[position].table.counts
        stall, late, misses = counts.stall_s, counts.late_s, counts.misses
        before = self._stalled[position]
        self._stalled[position] = (stall, late, misses)
        waited = (stall - before[0]) - (late - before[1])
        if misses > before[2] and waited > 0:
            self._measures.add_demand(waited, misses - before[2], self._flying)
        if self._last is not None:
            took = self._clock() - self._last - (stall - before[0])
            if took > 0:
                self._measures.add_layer(took, self._flying, self._begun)

    def leave(self, begun: int) -> None:
        """The layer's own time begins, with `begun` more prefetches under way."""
        self._begun = begun
        self._flying = sum(len(layer.incoming) for layer in self.layers if layer.incoming is not None)
        self._last = self._clock()

    def pause(self) -> None:
        """What comes next does not follow what was seen last."""
        self._last = None

    def _stall_s(self) -> float:
        return sum(layer.table.counts.stall_s for layer in self.layers)
