"""Slot tables under a trace: which accesses miss, for a capacity, a policy and pinned experts.

A step's experts must all be resident at once, so only others are evicted. It knows sequences of expert ids.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from titan.common.errors import PlanError

POLICIES = ("lru", "lfu", "belady")


@dataclass(frozen=True, slots=True)
class TableRun:
    """What a table did: misses a step, accesses that pinned experts did not serve, and evictions."""

    misses: tuple[int, ...]
    accesses: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Hits over accesses to experts that are not pinned; 1 without any."""
        return 1 - sum(self.misses) / self.accesses if self.accesses else 1.0


class Table:
    """A slot table's directory: who is resident, who goes next. Loads nothing."""

    def __init__(self, capacity: int, policy: str, future: Sequence[Collection[int]] | None = None) -> None:
        """`future`: all steps' experts, needed by Belady's policy alone."""
        if policy not in POLICIES:
            raise PlanError(f"there is no cache policy {policy!r}", f"use one of {', '.join(POLICIES)}")
        self.capacity, self.policy = capacity, policy
        self.evictions = 0
        self._last: dict[int, int] = {}  # resident expert -> last use, in order of use
        self._uses: dict[int, int] = {}
        self._next: dict[int, list[int]] = {}
        self._clock = 0
        for t, chosen in enumerate(future or ()):
            for expert in chosen:
                self._next.setdefault(expert, []).append(t)

    def __contains__(self, expert: int) -> bool:
        return expert in self._last

    def step(self, chosen: Collection[int]) -> list[int]:
        """Make the experts resident; returns those that were not.

        Raises:
            PlanError: more experts than the table has slots.
        """
        if len(chosen) > self.capacity:
            raise PlanError(f"a step needs {len(chosen)} experts, the table has {self.capacity} slots", "widen it")
        missing = [e for e in chosen if e not in self._last]
        keep = set(chosen)
        for _ in range(len(self._last) + len(missing) - self.capacity):
            self._last.pop(self._victim(keep))
            self.evictions += 1
        for expert in chosen:
            self._last.pop(expert, None)
            self._last[expert] = self._clock
            self._uses[expert] = self._uses.get(expert, 0) + 1
        self._clock += 1
        return missing

    def _victim(self, keep: set[int]) -> int:
        others = (e for e in self._last if e not in keep)
        if self.policy == "lru":
            return next(others)
        if self.policy == "lfu":
            return min(others, key=lambda e: (self._uses[e], self._last[e]))
        return max(others, key=self._next_use)

    def _next_use(self, expert: int) -> float:
        times = self._next.get(expert, ())
        at = bisect_right(times, self._clock)
        return times[at] if at < len(times) else float("inf")


def run_table(
    steps: Sequence[Sequence[int]], capacity: int, policy: str = "lru", pinned: Collection[int] = ()
) -> TableRun:
    """Replay one layer's steps. `capacity`: slots beside the pinned ones (C), at least a step's experts.

    Proposition of the formulation: with LRU and C = K the misses of a step are exactly S_t without S_{t-1}; with C at
    least the union of the last D steps, exactly the experts not used in them.

    Raises:
        PlanError: unknown policy, or a step that does not fit.
    """
    fixed = set(pinned)
    loose = [[e for e in chosen if e not in fixed] for chosen in steps]
    table = Table(capacity, policy, loose if policy == "belady" else None)
    misses = tuple(len(table.step(chosen)) for chosen in loose)
    return TableRun(misses, sum(map(len, loose)), table.evictions)
