"""The bookkeeping of one layer's slots: a map expert -> slot with pinned experts and a policy for the rest.

Pure state, no memory behind it: whoever owns the buffers asks for slots, fills them, and only then maps them, so a
slot under write is never one that a lookup returns. Not thread-safe: one owner a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from titan.common.slots.policy import LRU, EvictionPolicy


@dataclass(slots=True)
class SlotCounts:
    """Since start.

    Args:
        hits, misses: lookups (a distinct expert a lookup); an expert that a prefetch brought in time is a hit.
        loads, evictions: experts read in and thrown out; `prefetched` of the loads were predicted.
        useful: prefetched experts that were chosen before they were thrown out.
        late: prefetched experts that were needed while still in flight.
        cancelled: prefetches taken back before their read began.
        stall_s: seconds spent waiting for reads, `late_s` of them for late prefetches (sigma).
        installed: loads that nobody waited for with a token under way (pinned or preloaded), `install_s` in seconds.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    prefetched: int = 0
    useful: int = 0
    late: int = 0
    cancelled: int = 0
    stall_s: float = 0.0
    late_s: float = 0.0
    installed: int = 0
    install_s: float = 0.0

    @property
    def fetch_s(self) -> float | None:
        """Mean seconds an expert that was waited for; None before the first."""
        waited_for = self.loads - self.prefetched
        return (self.stall_s - self.late_s + self.install_s) / waited_for if waited_for > 0 else None


class SlotTable:
    """Slots 0..capacity-1 of one layer.

    A slot is free, reserved (being filled) or mapped to one expert; an expert is mapped to at most one slot.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"a slot table needs at least one slot, not {capacity}")
        self.capacity = capacity
        self.counts = SlotCounts()
        self.slots: dict[int, int] = {}  # mapped experts; read-only for callers
        self.pinned: set[int] = set()  # subset of the mapped ones
        self.policy: EvictionPolicy = policy or LRU()
        self._free = list(range(capacity - 1, -1, -1))
        self._reserved: dict[int, int] = {}
        self._pinning: set[int] = set()  # reserved for experts that will be pinned
        self.lost = 0
        self.uses: Counter[int] = Counter()  # how often each expert was looked up
        self._unused: set[int] = set()  # prefetched and not chosen yet

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing and wait for nothing."""
        return len(self._free)

    @property
    def evictable_slots(self) -> int:
        """Slots that a demand may use: all but those of pinned experts."""
        return self.capacity - len(self.pinned) - len(self._pinning) - self.lost

    @property
    def reserved(self) -> Collection[int]:
        """Experts whose slots are being filled."""
        return self._reserved.keys()

    def look_up(self, experts: Sequence[int], late: Collection[int] = ()) -> list[int]:
        """Count and remember the use of distinct `experts`; return those that are not mapped, in order.

        Those of `late` are being read ahead: they are hits, and are to be mapped as used.
        """
        self.policy.selected(experts)
        uses = self.uses
        if self._unused:
            came_in_time = self._unused.intersection(experts)
            self.counts.useful += len(came_in_time)
            self._unused -= came_in_time
        missing: list[int] = []
        slots, pinned = self.slots, self.pinned
        hits = 0
        for expert in experts:
            uses[expert] += 1
            if expert in slots:
                hits += 1
                if expert not in pinned:
                    self.policy.used(expert)
            elif expert in late:
                hits += 1
            else:
                missing.append(expert)
        self.counts.hits += hits
        self.counts.misses += len(missing)
        return missing

    def reserve(self, experts: Sequence[int], keep: Collection[int], *, pinning: bool = False) -> list[int] | None:
        """Take a slot for each of `experts`, evicting mapped ones that are neither pinned nor in `keep`.

        With `pinning`, those slots do not count among the evictable ones from now on.

        Returns one slot an expert, reserved until `map` or `release`; None, with nothing changed but evictions made,
        when there is no room.
        """
        taken: list[int] = []
        for expert in experts:
            if expert in self.slots or expert in self._reserved:
                raise ValueError(f"expert {expert} has a slot already")
            slot = self._free.pop() if self._free else self._evict(keep)
            if slot is None:
                for done in experts[: len(taken)]:
                    self.release(done)
                return None
            self._reserved[expert] = slot
            taken.append(slot)
        if pinning:
            self._pinning.update(experts)
        return taken

    def map(self, expert: int, *, pin: bool = False, prefetched: bool = False, used: bool = False) -> None:
        """The reserved slot of `expert` has been filled. `used`: a prefetched one that was looked up meanwhile."""
        self.slots[expert] = self._reserved.pop(expert)
        self._pinning.discard(expert)
        self.counts.loads += 1
        if prefetched:
            self.counts.prefetched += 1
            if used:
                self.counts.useful += 1
            else:
                self._unused.add(expert)
        if pin:
            self.pinned.add(expert)
        else:
            self.policy.used(expert)

    def release(self, expert: int) -> None:
        """Filling the reserved slot of `expert` failed or is not wanted any more."""
        self._free.append(self._reserved.pop(expert))
        self._pinning.discard(expert)

    def lose(self, expert: int) -> int:
        """The reserved slot of `expert` may still be written by a read that has not ended: out of use until `regain`.

        Returns the slot.
        """
        slot = self._reserved.pop(expert)
        self._pinning.discard(expert)
        self.lost += 1
        return slot

    def regain(self, slot: int) -> None:
        """A lost slot is not written any more."""
        self._free.append(slot)
        self.lost -= 1

    def pin(self, expert: int) -> None:
        """A mapped expert is not evicted any more."""
        self.pinned.add(expert)
        self.policy.gone(expert)

    def unpin(self, expert: int) -> None:
        """A pinned expert may be evicted from now on."""
        self.pinned.remove(expert)
        self.policy.used(expert)

    def drop(self, expert: int) -> None:
        """Unmap an expert, pinned or not."""
        self._free.append(self.slots.pop(expert))
        self.pinned.discard(expert)
        self._unused.discard(expert)
        self.policy.gone(expert)

    def _evict(self, keep: Collection[int]) -> int | None:
        victim = self.policy.victim(keep)
        if victim is None:
            return None
        self.policy.gone(victim)
        self._unused.discard(victim)
        self.counts.evictions += 1
        return self.slots.pop(victim)
