"""Work that others want done on the engine's thread, between two steps. Knows no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from titan.common.errors import TitanError

__all__ = ["Work"]

T = TypeVar("T")


class Work:
    """A queue of callables with their futures. `put` from any thread, `run` from the engine's."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._refused: TitanError | None = None

    @property
    def waiting(self) -> bool:
        return bool(self._queue)

    def put(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        if self._refused is not None:
            future.set_exception(self._refused)
        else:
            self._queue.append((work, future))
        return future

    def run(self) -> None:
        """Do everything that waits; what a callable raises is its future's."""
        while self._queue:
            work, future = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(error)

    def refuse(self, error: TitanError) -> None:
        """From now on nothing is done any more."""
        self._refused = error
        while self._queue:
            _, future = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
