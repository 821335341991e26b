"""Eviction policies: small classes that remember uses and name a victim. They know experts, not slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order of the evictable experts of one layer."""

    def selected(self, experts: Sequence[int]) -> None:
        """The router chose these distinct experts, wherever they are; comes before anything is evicted for them."""

    def used(self, expert: int) -> None:
        """An evictable expert was chosen, or has just come in."""

    def gone(self, expert: int) -> None:
        """The expert left the table."""

    def victim(self, keep: Container[int]) -> int | None:
        """The expert to evict first among those not in `keep`; None when there is none."""

    def emptied(self) -> EvictionPolicy:
        """A policy for another table of the same layer with nothing in it: it knows what this one has learned."""
        ...


class LRU:
    """Least recently used goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def selected(self, experts: Sequence[int]) -> None:
        pass

    def used(self, expert: int) -> None:
        self._order[expert] = None
        self._order.move_to_end(expert)

    def gone(self, expert: int) -> None:
        self._order.pop(expert, None)

    def victim(self, keep: Container[int]) -> int | None:
        for expert in self._order:
            if expert not in keep:
                return expert
        return None

    def emptied(self) -> LRU:
        return LRU()


class LFU:
    """Least frequently used goes first, the least recently used among equals.

    Counts survive an eviction, or a frequent expert would start again from nothing each time; they are halved every
    `decay_uses` uses, so that what was popular an hour ago does not stay for ever.
    """

    def __init__(self, decay_uses: int = 4096) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._counts: dict[int, int] = {}
        self._decay_uses = decay_uses
        self._uses = 0

    def selected(self, experts: Sequence[int]) -> None:
        pass

    def used(self, expert: int) -> None:
        self._order[expert] = None
        self._order.move_to_end(expert)
        self._counts[expert] = self._counts.get(expert, 0) + 1
        self._uses += 1
        if self._uses % self._decay_uses == 0:
            self._counts = {e: n // 2 for e, n in self._counts.items() if n > 1}

    def gone(self, expert: int) -> None:
        self._order.pop(expert, None)

    def victim(self, keep: Container[int]) -> int | None:
        candidates = [e for e in self._order if e not in keep]
        return min(candidates, key=lambda e: self._counts.get(e, 0)) if candidates else None

    def emptied(self) -> LFU:
        heir = LFU(self._decay_uses)
        heir._counts, heir._uses = dict(self._counts), self._uses
        return heir
