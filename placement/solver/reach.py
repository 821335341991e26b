"""Per level of time: how long a layer must still be expected to run, u of its experts not at home and x out of reach.

Two tables, both lower bounds on the part of the expected cost that falls into the level, for any choice of experts and
any dispatch. `reach` lets node 0 run any number of experts, so that it is least when the least frequent experts are the
farthest (exchange two experts, given that one of them is selected). `limited` counts what node 0 can run as well. They
know laws and rooms, no prices.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from titan.placement.solver.laws import Laws, balanced_loads
from titan.placement.solver.rooms import Level

Floats = NDArray[np.float64]
INTERVALS = 12  # of the weight at workers, in the bound for unequal weights; fewer are looser and faster
MAX_LIMITED_TOP_K = 16


class Reach:
    """Tables of one kind of layer, level by level."""

    def __init__(self, laws: Laws, *, intervals: int = INTERVALS) -> None:
        self.laws, self.intervals = laws, intervals
        self._crowding = None if laws.flat else laws.crowding()
        self._balanced: dict[int, Floats] = {}

    def reach(self, level: Level) -> Floats:
        """[u, x]: expected seconds of the level; +inf where x > u."""
        laws, top_k, experts = self.laws, self.laws.top_k, self.laws.experts
        home = laws.head[::-1]  # [u, k]
        enough = (level.room + np.minimum(level.home, top_k) >= top_k) * level.length_s
        table = np.full((experts + 1, experts + 1), float(level.length_s.sum()))
        sizes = np.arange(experts + 1)
        gap = np.maximum(sizes[:, None] - sizes[None, :], 0)
        fits = self._fits(level) if laws.flat else None
        for g in range(top_k + 1):
            if fits is not None:
                here = (enough @ fits[:, :, g])[gap]
            else:
                here = _clipped(self._crowding[:, :, g], level.packed[:, g], enough)  # type: ignore[index]
            table -= here * laws.between[:, :, g] * (home[:, top_k - g] / laws.total)[:, None]
        return np.where(np.tri(experts + 1, dtype=bool), np.maximum(table, 0.0), np.inf)

    def limited(self, level: Level, away: int, extra: int) -> Floats | None:
        """[u, x] like `reach` when at most `extra` experts, `away` of them not at home, have a second holder in reach;
        None when node 0 limits nothing in this level."""
        top_k = self.laws.top_k
        narrow = level.home < top_k
        if not narrow.any() or top_k > MAX_LIMITED_TOP_K:
            return None
        return (self._limited_flat if self.laws.flat else self._limited_skewed)(level, away, extra)

    def _fits(self, level: Level) -> Floats:
        """[pieces, q, r]: P(r selected of q equally frequent experts find room at the workers)."""
        laws, top_k = self.laws, self.laws.top_k
        sizes = np.arange(laws.experts + 1)
        drawn = sizes[:, None].astype(np.float64) ** np.arange(top_k + 1)
        drawn /= np.array([math.factorial(k) for k in range(top_k + 1)], dtype=np.float64)
        crowding = np.divide(drawn, laws.comb, out=np.full_like(drawn, 1e300), where=laws.comb > 0)
        out = np.empty((len(level.length_s), laws.experts + 1, top_k + 1))
        for i, (most, usable) in enumerate(zip(level.most.tolist(), level.usable.tolist(), strict=True)):
            packed = level.packed[i]
            out[i] = np.minimum(1.0, crowding * packed, where=packed > 0, out=np.zeros_like(crowding))
            if usable and most < top_k:
                if usable not in self._balanced:
                    self._balanced[usable] = balanced_loads(laws.comb, usable, top_k)
                out[i] = np.minimum(out[i], self._balanced[usable][:, :, most])
        return out

    def _limited_flat(self, level: Level, away: int, extra: int) -> Floats:
        """Three groups: single at workers (a), single at home (h), free to run anywhere."""
        laws, top_k, experts = self.laws, self.laws.top_k, self.laws.experts
        sizes = np.arange(experts + 1)
        u, x = sizes[:, None], sizes[None, :]
        a, h = np.maximum(u - x - away, 0), np.maximum(experts - u - extra, 0)
        free = np.maximum(experts - x - a - h, 0)
        fits = self._fits(level)
        table = np.full((experts + 1, experts + 1), float(level.length_s.sum()))
        enough = (level.room + level.home >= top_k) * level.length_s
        for g in range(top_k + 1):
            for at_home in range(top_k + 1 - g):
                if extra == 0 and g + at_home < top_k:
                    continue
                seconds = (enough * (level.home >= at_home)) @ fits[:, :, g]
                share = laws.comb[:, g][a] * laws.comb[h, at_home] * laws.comb[:, top_k - g - at_home][free]
                table -= seconds[a] * share / laws.total
        return np.where(np.tri(experts + 1, dtype=bool), np.maximum(table, 0.0), np.inf)

    def _limited_skewed(self, level: Level, away: int, extra: int) -> Floats:
        """Group polynomials bounded by their total weights: W^k / k! at workers, Maclaurin's average at home."""
        laws, top_k, experts = self.laws, self.laws.top_k, self.laws.experts
        sizes = np.arange(experts + 1)
        u, x = sizes[:, None], sizes[None, :]
        powers = range(top_k + 1)
        inverse = [1.0 / math.factorial(k) for k in powers]
        left = laws.heavy[-1] - laws.light[x] + 0.0 * u
        free = np.minimum(laws.heavy[min(extra, experts)], left)
        single = np.maximum(u - x - away, 0)
        low_all = laws.light[np.minimum(x + single, experts)] - laws.light[x]
        high_all = np.maximum(np.minimum(laws.heavy[np.maximum(u - x, 0)], left - free), low_all)
        at_home = np.maximum(experts - sizes, 1)
        homes = [(laws.comb[experts - sizes, k] / at_home.astype(np.float64) ** k)[:, None] for k in powers]
        enough = (level.room + level.home >= top_k) * level.length_s
        shared = left - free
        best = np.zeros((experts + 1, experts + 1))
        for i in range(self.intervals):
            low = low_all + (high_all - low_all) * (i / self.intervals)
            high = low_all + (high_all - low_all) * ((i + 1) / self.intervals)
            done = np.zeros_like(best)
            for room_home in np.unique(level.home):  # pieces with the same room at home share their factors
                here = np.where(level.home == room_home, enough, 0.0)
                chance = here @ level.packed  # [r]
                part = np.zeros_like(best)
                for g in np.flatnonzero(chance).tolist():
                    for k in range(min(int(room_home), top_k - g) + 1):
                        f = top_k - g - k
                        if extra == 0 and f:
                            continue
                        remote = np.clip(shared * (g / max(1, g + k)), low, high)  # where the term is largest
                        term = remote**g * np.maximum(shared - remote, 0.0) ** k * homes[k]
                        part += term * free**f * (chance[g] * inverse[g] * inverse[f])
                done += np.minimum(part / laws.total, float(here.sum()))
            best = np.maximum(best, done)
        table = float(level.length_s.sum()) - best
        return np.where(np.tri(experts + 1, dtype=bool), np.maximum(table, 0.0), np.inf)


def _clipped(factor: Floats, chance: Floats, length_s: Floats) -> Floats:
    """sum over pieces of length * min(1, factor * chance), elementwise in `factor`: piecewise linear and concave."""
    order = np.argsort(-chance, kind="stable")
    chance, length = chance[order], length_s[order]
    positive = chance > 0
    chance, length = chance[positive], length[positive]
    if not len(chance):
        return np.zeros_like(factor)
    knots = 1.0 / chance  # ascending
    clipped = np.concatenate([[0.0], np.cumsum(length)])
    slope = np.concatenate([np.cumsum((length * chance)[::-1])[::-1], [0.0]])
    at = np.searchsorted(knots, factor, side="right")
    return clipped[at] + slope[at] * np.where(np.isfinite(factor), factor, 0.0)
