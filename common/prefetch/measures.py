"""The prefetcher's clockwork: lambda, tau and kappa as moving averages of what serving itself shows.

Knows durations, nothing of experts.
"""

from __future__ import annotations

import math

__all__ = ["Average", "Measures"]

WEIGHT = 0.02  # of a new sample, once there are enough
START_S = 1e-4
LEAST_BEGUN = 0.25  # prefetches a busy layer


class Average:
    """Exponentially weighted mean; the plain mean while there are few samples. Outliers count at most tenfold."""

    __slots__ = ("samples", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.samples = 0

    def add(self, sample: float) -> None:
        self.samples += 1
        if self.samples > 8:
            sample = min(sample, 10 * self.value)
        self.value += max(WEIGHT, 1 / self.samples) * (sample - self.value)


class Measures:
    """What (9) needs. Busy: while prefetches were being read; idle: while none was."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.fetch_idle = Average()
        self.fetch_busy = Average()
        self.saved = Average()
        self.layer_idle = Average()
        self.layer_busy = Average()
        self.submit = Average()
        self.begun = Average()  # prefetches that a busy layer began

    def add_layer(self, seconds: float, flying: int, begun: int) -> None:
        """From one layer's routing to the next one's, stalls taken out.

        Args:
            flying: prefetches on their way meanwhile, to whichever layer; `begun` of them began with it.
        """
        (self.layer_busy if flying else self.layer_idle).add(seconds)
        if flying:
            self.begun.add(begun)

    def add_demand(self, seconds: float, experts: int, flying: int) -> None:
        """A layer waited so long for that many experts."""
        rounds = math.ceil(experts / self.readers)
        (self.fetch_busy if flying else self.fetch_idle).add(seconds / rounds)
        self.saved.add(seconds / experts)

    @property
    def fetch_s(self) -> float:
        """lambda."""
        return self.fetch_idle.value if self.fetch_idle.samples else self.fetch_busy.value

    @property
    def saved_s(self) -> float:
        """Stall an expert that was missed."""
        return self.saved.value

    @property
    def layer_s(self) -> float:
        """tau_l."""
        return self.layer_idle.value if self.layer_idle.samples else self.layer_busy.value

    @property
    def useless_s(self) -> float:
        """kappa: handing a prefetch over, plus what it slows: demand reads beside it, and the layer's own compute."""
        cost = self.submit.value if self.submit.samples else START_S
        begun = max(LEAST_BEGUN, self.begun.value)
        if self.fetch_busy.samples > 16 and self.fetch_idle.samples > 16:
            share = self.fetch_busy.samples / max(1, self.layer_busy.samples)
            cost += min(1.0, share) * max(0.0, self.fetch_busy.value - self.fetch_idle.value) / begun
        if self.layer_busy.samples > 16 and self.layer_idle.samples > 16:
            cost += max(0.0, self.layer_busy.value - self.layer_idle.value) / begun
        return cost
