"""Hints that wait until the worker has nothing better to do: the newest of each layer, a bounded number.

A hint that its layer's request has overtaken is of no use any more. Thread-safe. Knows neither slots nor disks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from titan.common.wire.messages import Hint

MAX_WAITING = 128


class Hints:
    """`came` counts all of them, `unused` those that led to nothing: overtaken, replaced, of no expert read here."""

    def __init__(self) -> None:
        self.came = self.unused = 0
        self._waiting: OrderedDict[tuple[str, int], Hint] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, session: str, hint: Hint) -> None:
        """Keep a hint of a session in place of an earlier one for the same layer."""
        with self._lock:
            self.came += 1
            if self._waiting.pop((session, hint.layer), None) is not None:
                self.unused += 1
            self._waiting[session, hint.layer] = hint
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)
                self.unused += 1

    def refuse(self) -> None:
        """Count one that is of an old session, or none at all."""
        with self._lock:
            self.came += 1
            self.unused += 1

    def overtaken(self, layer: int) -> None:
        """A layer has been asked for: what was said about it before is late."""
        if not self._waiting:
            return
        with self._lock:
            for key in [key for key in self._waiting if key[1] == layer]:
                del self._waiting[key]
                self.unused += 1

    def take(self) -> Hint | None:
        """The oldest that waits."""
        with self._lock:
            return self._waiting.popitem(last=False)[1] if self._waiting else None
