"""How long one worker takes to answer, as measured: what its deadlines and hedges are made of.

Calls are told apart by the power of two of their pairs: a layer's experts all have one shape, so what makes a reply
slower is how many pairs it carries. Pure arithmetic over what it was told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

WINDOW = 64  # latest replies of one size that count
ENOUGH = 16  # fewer say nothing about a tail
RENEW_EVERY = 8  # replies between two looks at the window
SPREADS = 8.0  # a deadline lies this many times (p95 - p50) above p95
FLOOR_SHARE = 0.25  # of timeouts.execute: below it a scheduler's hiccup would cost a session
LOAD_WEIGHT = 0.05  # of a new sample of reading
PROBED_FACTOR = 10.0  # until enough is known: timeouts.execute plus so many times what the worker's probe took


@dataclass(slots=True)
class _Window:
    times_s: list[float] = field(default_factory=list)
    count: int = 0
    p50_s: float = 0.0
    p95_s: float = 0.0
    longest_s: float = 0.0


class ReplyTimes:
    """Replies of one session.

    Args:
        execute_s: `timeouts.execute` of hosts.yaml; the deadline of a small call lies between a quarter of it and it.
        pair_s: seconds a (row, expert) pair, as the worker's probe measured (c_n).
        served: by layer, the experts that the worker reads from its own disk.

    Attributes:
        served_s: mean seconds that such an expert adds to a reply, found in memory or not; None before the first.
    """

    def __init__(self, execute_s: float, pair_s: float, served: Mapping[int, frozenset[int]] | None = None) -> None:
        self.pair_s = pair_s
        self.served_s: float | None = None
        self._served = served or {}
        self._execute_s = execute_s
        self._windows: dict[int, _Window] = {}

    def record(self, pairs: int, seconds: float) -> None:
        """A reply to a call of `pairs` pairs came after `seconds`."""
        window = self._windows.setdefault(pairs.bit_length(), _Window())
        if len(window.times_s) < WINDOW:
            window.times_s.append(seconds)
        else:
            window.times_s[window.count % WINDOW] = seconds
        window.count += 1
        if window.count % RENEW_EVERY == 0:
            ordered = sorted(window.times_s)
            window.p50_s = ordered[len(ordered) // 2]
            window.p95_s = ordered[(len(ordered) * 95) // 100]
            window.longest_s = ordered[-1]

    def record_load(self, layer: int, experts: np.ndarray, load_s: float) -> None:
        """A reply that asked for `experts`, some of them more than once, spent so long on reading."""
        served = self._served.get(layer)
        asked = len(served.intersection(experts.tolist())) if served else 0
        if asked:
            each = load_s / asked
            self.served_s = each if self.served_s is None else self.served_s + LOAD_WEIGHT * (each - self.served_s)

    def typical(self) -> tuple[int, float] | None:
        """(pairs, median seconds) of the most frequent size of call; None while too little is known.

        `pairs` is the middle of the sizes that are counted together.
        """
        known = [(w.count, size, w.p50_s) for size, w in list(self._windows.items()) if w.count >= ENOUGH]
        if not known:
            return None
        _, size, median_s = max(known)
        return max(1, 3 * 2 ** (size - 1) // 4), median_s

    def ceiling_s(self, pairs: int) -> float:
        """No deadline of a call is later than so many seconds; within them a call that failed may be sent elsewhere."""
        return self._execute_s + PROBED_FACTOR * self.pair_s * pairs

    def usual_s(self, pairs: int) -> float:
        """Seconds within which nearly every answer comes: p95, or ten times the probe until that is known."""
        window = self._known(pairs)
        return PROBED_FACTOR * self.pair_s * pairs if window is None else window.p95_s

    def deadline_s(self, pairs: int) -> float:
        """Seconds after which a call counts as failed and its session as lost."""
        ceiling_s = self.ceiling_s(pairs)
        window = self._known(pairs)
        if window is None:
            return ceiling_s
        measured_s = max(window.p95_s + SPREADS * (window.p95_s - window.p50_s), 2 * window.longest_s)
        return min(max(measured_s, FLOOR_SHARE * self._execute_s), ceiling_s)

    def hedge_s(self, pairs: int, local_s: float, deadline_s: float) -> float | None:
        """Seconds after which executing the call here, too, is worth it; None when it never is.

        That is the 95th percentile plus what executing here costs: having waited as long as the alternative takes,
        one loses at most a factor of two by turning to it, whatever the rest of the distribution looks like.

        Args:
            local_s: what executing these pairs from the local SSD takes.
            deadline_s: of the call; executing here must come to its end before.
        """
        window = self._known(pairs)
        if window is None:
            return None
        after_s = window.p95_s + local_s
        return after_s if after_s + local_s < deadline_s else None

    def _known(self, pairs: int) -> _Window | None:
        window = self._windows.get(pairs.bit_length())
        return window if window is not None and window.count >= ENOUGH else None
