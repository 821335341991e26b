"""Medians with spread, repeated until steady or the time is up, and how busy others kept the machine meanwhile.

Knows nothing of what it measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import psutil

NOISY_SPREAD = 0.3
QUIET_CORES = 0.25  # what others may take of the machine's cores in a look that counts
QUIET_ROUNDS, MOST_ROUNDS = 3, 10
IDLE_TIMES = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as user time already


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one thing: median, spread ((third quartile - first) / median), and how often it was measured.

    `others_cores`: cores of this machine that other processes kept busy meanwhile, where that was looked at.
    """

    median_s: float
    spread: float
    samples: int
    others_cores: float = 0.0

    @property
    def noisy(self) -> bool:
        """More than NOISY_SPREAD of spread was left when the time was up."""
        return self.spread > NOISY_SPREAD


class OtherWork:
    """How many cores of this machine other processes keep busy from here on."""

    def __init__(self) -> None:
        self._at, self._busy_s, self._own_s = time.perf_counter(), _busy_s(), time.process_time()

    def cores(self) -> float:
        """Mean since this was made. The system counts in steps of 10 ms: look for at least a tenth of a second."""
        spent = time.perf_counter() - self._at
        others_s = _busy_s() - self._busy_s - (time.process_time() - self._own_s)
        return max(0.0, others_s / spent) if spent > 0 else 0.0


def quiet_rounds(looks: Mapping[str, Callable[[], Measured]]) -> dict[str, Measured]:
    """Take all looks in turn until each was taken QUIET_ROUNDS times while others left the machine alone.

    Disturbances only ever add time: the quickest of a look's quiet rounds counts. After MOST_ROUNDS the quickest of
    all counts; its `others_cores` then say that the machine never was quiet.
    """
    found: dict[str, list[Measured]] = {name: [] for name in looks}
    for _ in range(MOST_ROUNDS):
        for name, look in looks.items():
            others = OtherWork()
            seen = look()
            found[name].append(Measured(seen.median_s, seen.spread, seen.samples, others.cores()))
        if all(sum(_quiet(seen) for seen in some) >= QUIET_ROUNDS for some in found.values()):
            break
    return {name: min([m for m in some if _quiet(m)] or some, key=lambda m: m.median_s) for name, some in found.items()}


def _quiet(seen: Measured) -> bool:
    return seen.others_cores <= QUIET_CORES


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


def _busy_s() -> float:
    """Seconds that all cores together have been busy since the system started."""
    return sum(seconds for kind, seconds in psutil.cpu_times()._asdict().items() if kind not in IDLE_TIMES)
