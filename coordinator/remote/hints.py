"""Telling workers what their layers will probably be asked for, where they read experts from their own disks.

A hint is sent or dropped, never waited for. Knows the workers' shares, not who predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from titan.common.wire.messages import MAX_HINTED, Hint
from titan.coordinator.moe.workers import ReadyWorker


class HintedWorker(Protocol):
    """`fetch_s`: seconds one of its reads takes, as it last said; None while nothing is known."""

    @property
    def ready(self) -> ReadyWorker | None: ...

    @property
    def fetch_s(self) -> float | None: ...


class HintSender:
    """Used by the engine's thread. `sent` and `dropped` count hints."""

    def __init__(self, workers: Sequence[HintedWorker]) -> None:
        self.sent = self.dropped = 0
        self._workers = workers
        self._known: dict[int, tuple[tuple[int, ...], frozenset[int]]] = {}

    def elsewhere(self, layer: int) -> frozenset[int]:
        """Experts of a layer that workers execute: reading them here would be for nothing."""
        ready = [r for w in self._workers if (r := w.ready) is not None]
        key = tuple(map(id, ready))
        known = self._known.get(layer)
        if known is None or known[0] != key:
            none: frozenset[int] = frozenset()
            found = none.union(*(r.held.get(layer, none) | r.served.get(layer, none) for r in ready))
            self._known[layer] = known = (key, found)
        return known[1]

    def fetch_s(self, layer: int) -> float | None:
        """The slowest read among the workers that read experts of this layer; None when none does."""
        found = [w.fetch_s for w in self._workers if (r := w.ready) is not None and layer in r.served]
        return max((seconds for seconds in found if seconds is not None), default=None)

    def hint(self, layer: int, ranked: Sequence[int], reads: int) -> None:
        """Name to each worker those of the experts, likeliest first, that it reads; of the first `reads` of all."""
        first = frozenset(ranked[:reads])
        for worker in self._workers:
            ready = worker.ready
            if ready is None or (served := ready.served.get(layer)) is None:
                continue
            mine = [e for e in ranked if e in served][:MAX_HINTED]
            wanted = len(first.intersection(mine))
            if wanted and ready.transport.hint(Hint(layer, mine, wanted)):
                self.sent += 1
            else:
                self.dropped += wanted > 0
