"""When a worker that failed is tried again: closed while it serves, open while it is left alone, probing in between.

Every failure doubles the pause; time served well forgives. One that comes back and goes again is left alone longer and
has to serve longer before that is forgotten. Knows no sockets and no clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FORGIVEN_AFTER = 4.0  # one failure is forgiven by serving this many times the pause that it cost
JITTER = 0.25


class Breaker:
    """State of one worker: `state` is "closed", "open" or "probing".

    Args:
        first_s: pause after a single failure.
        longest_s: no pause is longer (but for the jitter).
        draw: a number in [0, 1), for the jitter.
    """

    def __init__(self, first_s: float, longest_s: float, draw: Callable[[], float] = random.random) -> None:
        self.state = "probing"
        self.failures = 0  # that are not forgiven
        self._first_s, self._longest_s, self._draw = first_s, longest_s, draw

    def probe(self) -> None:
        """The pause is over: Hello, slot table and a call are tried."""
        self.state = "probing"

    def close(self) -> None:
        """They succeeded: the worker serves."""
        self.state = "closed"

    def open(self, served_s: float, *, planned: bool = False) -> float:
        """The worker failed after serving for `served_s` (0 when probing failed); returns the pause in seconds.

        Args:
            planned: it had announced that it would go: no failure.
        """
        self.state = "open"
        while self.failures and served_s >= (cost_s := FORGIVEN_AFTER * self._pause_s()):
            served_s -= cost_s
            self.failures -= 1
        if not planned:
            self.failures += 1
        return self._pause_s() * (1 - JITTER + 2 * JITTER * self._draw())

    def _pause_s(self) -> float:
        doublings = min(max(self.failures - 1, 0), 62)
        return min(self._first_s * 2**doublings, self._longest_s)
