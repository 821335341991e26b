"""Slots that a read which has not ended may still write: nobody uses them until it has.

Knows slots and whether a read has ended, nothing of disks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from titan.common.slots.table import SlotTable

__all__ = ["OverdueSlots"]


class OverdueSlots:
    """Of one table. Belongs to the table's owner; only the events are set elsewhere."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._waiting: list[tuple[threading.Event, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ended: threading.Event, experts: Iterable[int]) -> None:
        """The reserved slots of `experts` may be written until `ended` is set."""
        self._waiting.extend((ended, self._table.lose(expert)) for expert in experts)

    def regain(self) -> None:
        """Give the table back what nobody writes any more."""
        for ended, slot in self._waiting:
            if ended.is_set():
                self._table.regain(slot)
        self._waiting = [(ended, slot) for ended, slot in self._waiting if not ended.is_set()]
