"""Warnings that somebody else can cause at will: the first few of a minute are written, the others are counted.

A stranger who tries a thousand times so costs a few lines and a number, and no disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan.common.log import Log

BURST = 10
WINDOW_S = 60.0


@dataclass(slots=True)
class _Window:
    began: float
    written: int = 0
    counted: int = 0
    last: str = ""


class LimitedLog:
    """Warnings by kind. Thread-safe; `tick` has to be called every now and then, and `close` at the end."""

    def __init__(
        self, log: Log, *, burst: int = BURST, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._burst, self._window_s, self._clock = log, burst, window_s, clock
        self._windows: dict[str, _Window] = {}
        self._lock = threading.Lock()

    def warning(self, kind: str, detail: str, /, **fields: Any) -> None:
        """Write `kind: detail`, or count it. Kinds are few and the program's own; a detail may come from outside."""
        with self._lock:
            window = self._windows.setdefault(kind, _Window(self._clock()))
            if window.written >= self._burst:
                window.counted += 1
                window.last = f"{detail} ({' '.join(f'{k}={v}' for k, v in fields.items())})"
                return
            window.written += 1
        self._log.warning(f"{kind}: {detail}", **fields)

    def tick(self) -> None:
        """Write one line for each kind of which some were counted, once its minute is over."""
        self._finish(lambda window: self._clock() - window.began >= self._window_s)

    def close(self) -> None:
        """Write what has been counted so far."""
        self._finish(lambda _window: True)

    def _finish(self, over: Callable[[_Window], bool]) -> None:
        with self._lock:
            done = {kind: window for kind, window in self._windows.items() if over(window)}
            for kind in done:
                del self._windows[kind]
        for kind, window in done.items():
            if window.counted:
                summary = f"{kind}: {window.counted} more in {self._clock() - window.began:.0f} s"
                self._log.warning(summary, count=window.counted, last=window.last)
