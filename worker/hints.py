"""Hints that wait until the worker has nothing better to do: the newest of each layer, a bounded number.

A hint that its layer's request has overtaken is of no use any more. Thread-safe. Knows neither slots nor disks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from titan.common.metrics import Tally
from titan.common.wire.messages import Hint

MAX_WAITING = 128
DROPPED = ("overtaken", "replaced", "crowded", "refused", "useless")


class Hints:
    """`came` counts all of them, `followed` those that began a read, `dropped` the others by reason.

    Reasons: "overtaken" by its layer's request, "replaced" by a newer one, "crowded" out, "refused" (of an old session,
    or none at all), "useless" (nothing to read, or not worth it).
    """

    def __init__(self) -> None:
        self.came = self.followed = 0
        self.dropped = Tally("reason")
        self._waiting: OrderedDict[tuple[str, int], Hint] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def unused(self) -> int:
        """Those that led to nothing."""
        return int(self.dropped.total)

    def put(self, session: str, hint: Hint) -> None:
        """Keep a hint of a session in place of an earlier one for the same layer."""
        with self._lock:
            self.came += 1
            if self._waiting.pop((session, hint.layer), None) is not None:
                self.dropped.add("replaced")
            self._waiting[session, hint.layer] = hint
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)
                self.dropped.add("crowded")

    def refuse(self) -> None:
        """Count one that is of an old session, or none at all."""
        with self._lock:
            self.came += 1
            self.dropped.add("refused")

    def overtaken(self, layer: int) -> None:
        """A layer has been asked for: what was said about it before is late."""
        if not self._waiting:
            return
        with self._lock:
            for key in [key for key in self._waiting if key[1] == layer]:
                del self._waiting[key]
                self.dropped.add("overtaken")

    def take(self) -> Hint | None:
        """The oldest that waits."""
        with self._lock:
            return self._waiting.popitem(last=False)[1] if self._waiting else None

    def done(self, *, followed: bool) -> None:
        """One that was taken began a read, or led to nothing."""
        if followed:
            self.followed += 1
        else:
            self.dropped.add("useless")
