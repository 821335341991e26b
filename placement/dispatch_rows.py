"""Dispatch for several rows at once: an expert brings as many (row, expert) pairs as rows selected it.

With weights the assignment is a scheduling problem without a fast exact answer, so replicas are given out longest
first and improved by moving one expert at a time. Without replicas the answer is the one forced by residency, with
reads decided expert by expert. It knows figures and holders only.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from titan.placement.cost import Costs
from titan.placement.dispatch import Choice, options_of

MAX_ROUNDS = 64


def choose_rows(
    selected: Sequence[int],
    rows: Sequence[int],
    holders: Sequence[Sequence[int]],
    costs: Costs,
    *,
    queue_s: Sequence[float] | None = None,
    local_resident: Container[int] = (),
    down: Container[int] = (),
    evict_s: float = 0.0,
) -> Choice:
    """A good execution of a batch's experts; `rows[i]` rows selected `selected[i]`. Other arguments as for `choose`."""
    queue = queue_s if queue_s is not None else (0.0,) * len(costs.pair_s)
    start = [b + q for b, q in zip(costs.base_s, queue, strict=True)]
    state = _State(rows, options_of(selected, holders, local_resident, down), start, costs, evict_s)
    state.place_longest_first()
    state.improve()
    reads = [e for e, node in zip(selected, state.place, strict=True) if node < 0]
    return Choice([max(0, n) for n in state.place], reads, state.cost() - state.charge())


class _State:
    """A full assignment, -1 for "read and run at home", with the pairs each node got."""

    def __init__(
        self, rows: Sequence[int], options: list[list[int]], start: list[float], costs: Costs, evict_s: float
    ) -> None:
        self.rows, self.options, self.start, self.costs = rows, options, start, costs
        self.load = [0] * len(start)
        self.place = [-1] * len(rows)
        self.misses, self.evict_s = len(rows), evict_s
        self.unavoidable = sum(not o for o in options)
        for count in rows:
            self.load[0] += count

    def finish(self, node: int) -> float:
        return self.start[node] + self.load[node] * self.costs.pair_s[node] if self.load[node] else 0.0

    def cost(self) -> float:
        span = max(self.finish(n) for n in range(len(self.load)))
        return span + -(-self.misses // self.costs.readers) * self.costs.ssd_s + self.charge()

    def charge(self) -> float:
        return max(0, self.misses - self.unavoidable) * self.evict_s

    def move(self, position: int, node: int) -> None:
        old, count = self.place[position], self.rows[position]
        self.load[max(0, old)] -= count
        self.load[max(0, node)] += count
        self.misses += (node < 0) - (old < 0)
        self.place[position] = node

    def place_longest_first(self) -> None:
        order = sorted(range(len(self.rows)), key=lambda p: (len(self.options[p]) > 1, -self.rows[p]))
        for count in self.rows:
            self.load[0] -= count
        unplaced = [p for p in order if not self.options[p]]
        for position in unplaced:
            self.load[0] += self.rows[position]
        for position in order:
            if not self.options[position]:
                continue
            count = self.rows[position]
            node = min(
                self.options[position],
                key=lambda n: self.start[n] + (self.load[n] + count) * self.costs.pair_s[n],
            )
            self.load[node] += count
            self.place[position] = node
            self.misses -= 1

    def improve(self) -> None:
        """Take from the node that finishes last, to another holder or to a read, while that helps.

        A read alone may not help while two help together (readers work in parallel), so the best of a whole
        descending sequence of reads is kept.
        """
        best, kept, idle = self.cost(), self.place[:], 0
        for _ in range(MAX_ROUNDS):
            if idle > self.costs.readers + 2:
                break
            idle += 1
            last = max(range(len(self.load)), key=self.finish)
            moves = [(p, n) for p, at in enumerate(self.place) if at == last for n in self.options[p] if n != last]
            if last:
                moves += [(p, -1) for p, at in enumerate(self.place) if at == last and 0 not in self.options[p]]
            if not moves:
                break
            position, node = min(moves, key=self._after)
            self.move(position, node)
            if (now := self.cost()) < best - 1e-15:
                best, kept, idle = now, self.place[:], 0
        for position, node in enumerate(kept):
            self.move(position, node)

    def _after(self, move: tuple[int, int]) -> tuple[float, int]:
        position, node = move
        old = self.place[position]
        self.move(position, node)
        key = (self.cost(), self.rows[position])
        self.move(position, old)
        return key
