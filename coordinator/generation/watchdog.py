"""Notices a turn of the engine that does not end. A thread of its own, because the engine's cannot look at itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Watchdog"]


class Watchdog:
    """Calls `on_stuck(seconds)` once for each turn that takes longer than `limit_s`.

    `begin` and `end` bracket turns; they cost two assignments.
    """

    def __init__(self, limit_s: float, on_stuck: Callable[[float], None]) -> None:
        self.limit_s = limit_s
        self._on_stuck = on_stuck
        self._began: float | None = None
        self._reported: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="titan-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self._began = None

    @property
    def stuck_s(self) -> float:
        """How long the current turn has been over its limit; 0 when it is not."""
        began = self._began
        return 0.0 if began is None else max(time.monotonic() - began - self.limit_s, 0.0)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(min(self.limit_s / 4, 1.0)):
            began = self._began
            if began is None or began == self._reported:
                continue
            took = time.monotonic() - began
            if took > self.limit_s:
                self._reported = began
                self._on_stuck(took)
