"""Medians with spread, repeated until they are steady or the time is up. Knows nothing of what it measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NOISY_SPREAD = 0.3


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one thing: median, spread ((third quartile - first) / median), and how often it was measured."""

    median_s: float
    spread: float
    samples: int

    @property
    def noisy(self) -> bool:
        """More than NOISY_SPREAD of spread was left when the time was up."""
        return self.spread > NOISY_SPREAD


def measure(work: Callable[[], object], *, samples: int = 15, budget_s: float = 1.0) -> Measured:
    """Time `work` after one warm-up, at least `samples` times; a noisy measure goes on until `budget_s` is spent."""
    work()
    return summarise(lambda: _timed(work), samples=samples, budget_s=budget_s)


def summarise(sample: Callable[[], float], *, samples: int = 15, budget_s: float = 1.0) -> Measured:
    """The same for something that returns its own seconds."""
    seconds: list[float] = []
    started = time.perf_counter()
    while True:
        seconds.append(sample())
        spent = time.perf_counter() - started
        if len(seconds) >= 3 and spent > 4 * budget_s:
            break  # one run is slow: few samples must do
        if len(seconds) >= samples and (spent > budget_s or not _of(seconds).noisy):
            break
    return _of(seconds)


def _of(seconds: list[float]) -> Measured:
    low, median, high = np.percentile(seconds, (25, 50, 75))
    return Measured(float(median), float((high - low) / median) if median > 0 else 0.0, len(seconds))


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
