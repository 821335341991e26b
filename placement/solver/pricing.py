"""The cheapest way to divide a layer at given prices of memory. Knows one kind of layer's tables and prices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from titan.placement.solver.layer_bound import LayerBound

Floats = NDArray[np.float64]
STEPS = 32  # parts in which the experts at a class and farther are looked at
PARTS = 4  # ranges of u whose best divisions are returned besides the best of all


@dataclass(frozen=True, slots=True)
class Column:
    """One way to divide a layer: its bound, slots at home, slots a class of workers, experts in no memory."""

    kind: int
    cost_s: float
    home: int
    workers: tuple[int, ...]
    missing: int


def cheapest(table: LayerBound, prices: Floats, kind: int) -> tuple[float, list[Column]]:
    """The least priced cost of a layer over all divisions, and good divisions, the best among them.

    A second holder costs at least the cheapest slot no farther than it is.

    Args:
        prices: seconds a slot: node 0, then every class of workers, nearest first.
    """
    experts, classes = table.experts, len(prices) - 1
    sizes = np.arange(experts + 1)
    start = table.base + float(prices[0]) * (experts - sizes)
    if not classes:
        best = np.argsort(start, kind="stable")[:2]
        found = [
            Column(kind, float(table.base[u]), int(experts - u), (), int(u)) for u in best if np.isfinite(start[u])
        ]
        return float(start[best[0]]), found
    walk = _Walk(table, prices[1:], start)
    last = walk.arrays[-1]
    per_u = last.min(axis=(0, 2))
    edges = np.linspace(0, experts + 1, PARTS + 1).astype(int)
    tops = {int(np.argmin(per_u)), 0} | {int(a + np.argmin(per_u[a:b])) for a, b in pairwise(edges) if b > a}
    return float(per_u.min()), [walk.column(u, kind) for u in sorted(tops) if np.isfinite(per_u[u])]


class _Walk:
    """Least priced cost by [bucket of second holders, u, x], one array a class, from the nearest on."""

    def __init__(self, table: LayerBound, prices: Floats, start: Floats) -> None:
        self.table, self.prices = table, prices
        self.second = np.minimum.accumulate(prices)
        self.low = np.array(table.least_extra, dtype=np.float64)
        classes, buckets = len(prices), len(self.low)
        sizes = np.arange(table.experts + 1)
        before = np.full((1, len(sizes), len(sizes)), np.inf)
        before[0, sizes, sizes] = start + prices[0] * sizes
        self.arrays: list[Floats] = []
        for i in range(classes):
            following = prices[i + 1] if i + 1 < classes else 0.0
            second = self.second[i + 1] if i + 1 < classes else 0.0
            move = (following - prices[i]) * sizes + table.reads(i + 1)
            here = np.empty((buckets, len(sizes), len(sizes)))
            least = None
            for b in range(buckets):
                came = before[min(b, len(before) - 1)]
                least = came if least is None else np.minimum(least, came)
                here[b] = _step(least, table.level(i + 1, b), table.own(i + 1, b))
                here[b] += move + self.low[b] * (self.second[i] - second)
            self.arrays.append(here)
            before = here

    def column(self, u: int, kind: int) -> Column:
        """The best division with u experts not at home, found backwards."""
        last = self.arrays[-1][:, u]
        b, x = divmod(int(np.argmin(last)), last.shape[1])
        depth, extra = [x], [b]
        for i in range(len(self.prices) - 1, 0, -1):
            options = self.arrays[i - 1][: b + 1, u, x : u + 1]
            own = self.table.own(i + 1, b)
            level = self.table.level(i + 1, b)[u, x]
            if own is not None:
                options = options + np.maximum(level, own[x : u + 1, x])[None, :]
            b, step = divmod(int(np.argmin(options)), options.shape[1])
            x += step
            depth.insert(0, x)
            extra.insert(0, b)
        cost, used, farther, seconds = float(self.table.base[u]), [0] * len(self.prices), u, 0
        for i, (x, b) in enumerate(zip(depth, extra, strict=True)):
            own, level = self.table.own(i + 1, b), float(self.table.level(i + 1, b)[u, x])
            cost += float(self.table.reads(i + 1)[u, x])
            cost += level if own is None else max(level, float(own[farther, x]))
            used[i] += farther - x
            more = max(0, int(self.low[b]) - seconds)
            used[int(np.argmin(self.prices[: i + 1]))] += more
            farther, seconds = x, seconds + more
        return Column(kind, cost, self.table.experts - u, tuple(used), depth[-1])


def _step(before: Floats, level: Floats, own: Floats | None) -> Floats:
    """[u, x]: least of before[u, z] + max(level[u, x], own[z, x]) over z >= x.

    z is taken in parts; `own`, which grows with z, is taken at a part's lower end.
    """
    if own is None:
        return np.minimum.accumulate(before[:, ::-1], axis=1)[:, ::-1] + level
    size = len(before)
    edges = np.unique(np.linspace(0, size, min(STEPS, size) + 1).astype(int))
    out = np.full_like(before, np.inf)
    for low, high in pairwise(edges.tolist()):
        inside = np.minimum.accumulate(before[:, low:high][:, ::-1], axis=1)[:, ::-1]
        here = np.diagonal(own)[low:high][None, :]
        out[:, low:high] = np.minimum(out[:, low:high], inside + np.maximum(level[:, low:high], here))
        if low:
            whole = inside[:, :1] + np.maximum(level[:, :low], own[low, :low][None, :])
            out[:, :low] = np.minimum(out[:, :low], whole)
    return out
