"""Ctrl-C as a wish to stop waiting, for a command that goes on afterwards. Knows neither HTTP nor what is shown.

Python turns SIGINT into an exception wherever the main thread happens to be, also inside of what starts or stops a
display. Here it is one only while the next item is waited for; at any other time it is kept until then.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

__all__ = ["Stoppable", "handled_elsewhere"]

T = TypeVar("T")

TICK_S = 0.2  # a signal that comes just before the wait for a socket begins does not end it; a tick does
_SIGNALS = (signal.SIGINT, signal.SIGALRM)


class Stoppable:
    """A context in which Ctrl-C ends the loop over `items`, and does nothing else. On the main thread."""

    def __init__(self) -> None:
        self._asked = self._waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stoppable:
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: self._interrupt,
            signal.SIGALRM: lambda *_: None,
        }
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def items(self, source: Iterator[T]) -> Generator[T]:
        """What `source` gives, until Ctrl-C; the source is then at its end or must be closed."""
        try:
            while True:
                self._waiting = True
                if self._asked:
                    return
                item = next(source)
                self._waiting = False
                yield item
        except (StopIteration, KeyboardInterrupt):
            return
        finally:
            self._waiting = False

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt


@contextmanager
def handled_elsewhere() -> Generator[None]:
    """Threads that are started meanwhile leave the signals to the main thread, whose wait they are to end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
