"""A lower bound on the expected cost of one layer for every way to divide it, whatever the experts and the dispatch.

A layer is divided by levels: u experts are not at home, x_i of them at the i-th class of workers or farther, s in no
memory, and y_i have a second holder no farther than class i. The cost is the sum of what falls into each stretch of
time: before an SSD read can be done, `reach` says how likely the row is still running; later, a read may stand for any
expert, and the least cost of the selected counts is taken. It knows tables, neither nodes' memory nor prices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from titan.placement.solver.laws import Laws
from titan.placement.solver.outcome import Outcomes
from titan.placement.solver.reach import INTERVALS, Reach
from titan.placement.solver.rooms import Level

Floats = NDArray[np.float64]


class LayerBound:
    """Tables of one kind of layer.

    Attributes:
        base: [u] seconds before any worker is done, with the synchronisation when u > 0; inf where u > E - K.
        least_extra: least y of every bucket of second holders.

    Args:
        levels: of `rooms.levels`, cut into what node 0 limits and what it does not: (narrow, wide).
        deep: `Outcomes.deep` of what is farther than class i, for every class.
        buckets: (least y, y assumed) of second holders.
        members: workers in every class.
        from_s: when an SSD read could be done.
        own: like `levels`, with the room of the level's own class alone; None: not looked at.
        limited: buckets for which node 0's room is looked at.
    """

    def __init__(
        self,
        weights: Floats,
        levels: list[tuple[Level, Level]],
        outcomes: Outcomes,
        deep: list[Floats],
        top_k: int,
        buckets: list[tuple[int, int]],
        members: list[int],
        sync_s: float,
        from_s: float,
        *,
        own: list[Level] | None = None,
        limited: int = 1000,
        intervals: int = INTERVALS,
    ) -> None:
        laws = Laws(weights, top_k)
        self.experts, self.top_k = laws.experts, top_k
        self.least_extra = [low for low, _ in buckets]
        self._assumed, self._members = [high for _, high in buckets], members
        reach = Reach(laws, intervals=intervals)
        away = np.arange(self.experts + 1)
        first = reach.reach(levels[0][0]) + reach.reach(levels[0][1])
        later, chain = _reads(laws, outcomes, deep, from_s)
        self.base = first[away, away] + later + sync_s * (away > 0)
        self.base[(away > self.experts - top_k) & (away > 0)] = np.inf
        if len(levels) == 1:  # no workers: what is not at home is in no memory
            self.base += chain[0][away, away]
            self._wide, self._reads, self._narrow, self._limited, self._own = [], [], [], [], []
            return
        self._own = [reach.reach(level) for level in own[2:]] if own else []
        self._wide, self._reads = [reach.reach(wide) for _, wide in levels[1:]], chain
        self._narrow = [reach.reach(narrow) if len(narrow.length_s) else None for narrow, _ in levels[1:]]
        self._limited = [
            [
                None if known is None or b >= limited else reach.limited(narrow, self._second_away(i, y), y)
                for b, y in enumerate(self._assumed)
            ]
            for i, ((narrow, _), known) in enumerate(zip(levels[1:], self._narrow, strict=True), start=1)
        ]

    def own(self, i: int, bucket: int) -> Floats | None:
        """[z, x]: like `level`, z experts being at class i or farther, and class i the only one with limited room."""
        if i < 2 or not self._own:
            return None
        # an expert of class i that no nearer node holds has its second holder in the class itself
        return _relieved(self._own[i - 2], self._assumed[bucket] if self._members[i - 1] > 1 else 0)

    def _second_away(self, i: int, extra: int) -> int:
        """Of `extra` experts with a second holder in reach of class i, those that need not be at home."""
        return extra if sum(self._members[:i]) > 1 else 0

    def level(self, i: int, bucket: int) -> Floats:
        """[u, x]: seconds that fall into level i (1 and on) when x experts are farther than class i, without `own`."""
        wide, narrow = self._wide[i - 1], self._narrow[i - 1]
        extra = self._second_away(i, self._assumed[bucket])
        table = _relieved(wide, extra)
        if narrow is not None:
            part, limited = _relieved(narrow, extra), self._limited[i - 1][bucket]
            table = table + (part if limited is None else np.maximum(part, limited))
        return table

    def reads(self, i: int) -> Floats:
        """[u, x]: seconds after an SSD read could be done, that x experts farther than class i add."""
        return self._reads[i - 1]


def _relieved(table: Floats, extra: int) -> Floats:
    """[u, x]: `table` at u - extra. Where node 0's room is not looked at, free experts are as good as at home."""
    if not extra:
        return table
    sizes = np.arange(len(table))
    return table[np.maximum(sizes[:, None] - extra, np.minimum(sizes[None, :], sizes[:, None])), sizes[None, :]]


def _reads(laws: Laws, outcomes: Outcomes, deep: list[Floats], from_s: float) -> tuple[Floats, list[Floats]]:
    """([u], per level [u, d]) seconds after `from_s`: d experts farther than the level's class add the second to the
    first.

    With k of the d and r of the u selected, a row takes deep_i(r, k) at least. Only what it has above what nearer
    levels can bring is counted, so the levels' parts add up. With unequal weights that is a fixed instant a level: a
    part then rises with r and k, so that it is least when the least frequent experts are farthest.
    """
    top_k, experts = laws.top_k, laws.experts
    far = laws.tail * laws.head[::-1][:, ::-1] / laws.total  # [d, k]
    reached = np.maximum(outcomes.least[:, 0], from_s)
    base, tables = far @ (reached - from_s), []
    for times in deep:
        following = np.maximum(reached, np.diagonal(times))
        times = np.where(np.isfinite(times), times, 0.0)
        if laws.flat:
            gain = np.maximum(times - reached[:, None], 0.0)  # [r, k]
        else:
            begin, end = float(reached.max()), float(following.max())
            gain = np.clip(times, begin, max(begin, end)) - begin
        table = np.zeros((experts + 1, experts + 1))
        for k in range(1, top_k + 1):
            for r in (k + np.flatnonzero(gain[k:, k])).tolist():
                rest = laws.head[::-1, top_k - r] * (gain[r, k] / laws.total)
                table += laws.between[:, :, r - k] * laws.tail[None, :, k] * rest[:, None]
        tables.append(np.where(np.tri(experts + 1, dtype=bool), table, np.inf))
        reached = following
    return base, tables
