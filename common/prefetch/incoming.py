"""Experts on their way into one layer's slots ahead of need: begun early, mapped at layer entry, never in the way.

Belongs to the thread that owns the slot table; only the reads happen elsewhere. Knows neither predictors nor budgets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from titan.common.errors import DiskStalled
from titan.common.slots.buffers import LayerBuffers
from titan.common.slots.overdue import OverdueSlots
from titan.common.slots.table import SlotTable
from titan.common.store.readers import ReaderPool, Ticket

__all__ = ["Incoming"]


class Incoming:
    """Prefetches of one layer.

    Args:
        fill: reads one expert into given views.
        settle: makes sure that no unevaluated graph reads the layer's slots.
        overdue: takes the slots of reads that do not end.
    """

    def __init__(
        self,
        buffers: LayerBuffers,
        table: SlotTable,
        fill: Callable[[int, int, Sequence[np.ndarray]], None],
        readers: ReaderPool,
        settle: Callable[[], None],
        overdue: OverdueSlots,
    ) -> None:
        self._buffers = buffers
        self._table = table
        self._fill = fill
        self._readers = readers
        self._settle = settle
        self._overdue = overdue
        self._tickets: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def begin(self, experts: Sequence[int], keep: Collection[int]) -> list[int]:
        """Start reading `experts` that are neither here nor on their way, evicting none of `keep` for them.

        Returns those begun; it stops at the first for which no slot can be had.
        """
        begun: list[int] = []
        layer = self._buffers.layer.index
        for expert in experts:
            if expert in self._table.slots or expert in self._table.reserved:
                continue
            if not begun:
                self._settle()
            slots = self._table.reserve([expert], keep)
            if slots is None:
                break
            targets = self._buffers.targets(slots[0])
            self._tickets[expert] = self._readers.prefetch(
                lambda expert=expert, targets=targets: self._fill(layer, expert, targets)
            )
            begun.append(expert)
        return begun

    def land(self, needed: Collection[int]) -> list[int]:
        """The layer is entered: map what has arrived, take back what has not begun; returns what is needed and late."""
        late: list[int] = []
        for expert, ticket in list(self._tickets.items()):
            if ticket.done.is_set():
                self._finish(expert, ticket)
            elif ticket.cancel():  # not begun: a demand read is sooner, or nobody wants it any more
                del self._tickets[expert]
                self._table.release(expert)
                self._table.counts.cancelled += 1
            elif expert in needed:
                late.append(expert)
        return late

    def wait_for(self, late: Sequence[int]) -> None:
        """Wait for those that `land` returned and map them: they have been looked up already."""
        start = time.perf_counter()
        for expert in late:
            if expert in self._tickets:
                self._wait(expert, self._tickets[expert], used=True)
        waited = time.perf_counter() - start
        counts = self._table.counts
        counts.late += len(late)
        counts.late_s += waited
        counts.stall_s += waited

    def give_up(self, late: Sequence[int]) -> None:
        """The disk hangs, as a demand read has found out: wait for none of them."""
        tickets = {expert: self._tickets.pop(expert) for expert in late if expert in self._tickets}
        self._readers.abandon(list(tickets.values()))
        for expert, ticket in tickets.items():
            self._overdue.add(ticket.done, [expert])

    def clear(self) -> None:
        """Give every slot back that can be: cancel what has not begun, wait for the rest and map it."""
        for expert, ticket in list(self._tickets.items()):
            if ticket.cancel():
                del self._tickets[expert]
                self._table.release(expert)
                self._table.counts.cancelled += 1
            else:
                self._wait(expert, ticket)

    def _wait(self, expert: int, ticket: Ticket, *, used: bool = False) -> None:
        try:
            ticket.wait_done()
        except DiskStalled:
            del self._tickets[expert]
            self._overdue.add(ticket.done, [expert])
        else:
            self._finish(expert, ticket, used=used)

    def _finish(self, expert: int, ticket: Ticket, *, used: bool = False) -> None:
        del self._tickets[expert]
        if ticket.error is None:
            self._table.map(expert, prefetched=True, used=used)
        else:  # whoever needs the expert reads it again and learns what is wrong
            self._table.release(expert)
