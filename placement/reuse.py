"""Reuse from row to row: how long ago the experts of a row were last chosen, and what LRU slots then miss.

Pure but for the counts it keeps. Knows rows of expert ids and frequencies; neither files, nor nodes, nor times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from titan.placement.trace import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LAGS = tuple(1 << i for i in range(11))  # rows
ENOUGH_ROWS = 256  # fewer say nothing about a layer
LONG_AGO = -(1 << 40)
Reuse = tuple[tuple[float, ...], ...]  # [moe layer][lag]: see `ReuseCounts.fresh`


class ReuseCounts:
    """How many of one layer's selections were of experts that none of the last d rows had selected, d in LAGS."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        self._top_k = top_k
        self._last = np.full(num_experts, LONG_AGO, np.int64)
        self._fresh = np.zeros(len(LAGS), np.int64)
        self.rows = 0

    def add(self, ids: NDArray[np.integer]) -> None:
        """ids: [rows, K], in the order they were decoded."""
        rows, top_k = ids.shape
        if not rows:
            return
        at = np.repeat(np.arange(self.rows, self.rows + rows), top_k)
        chosen = ids.astype(np.int64).ravel()
        order = np.argsort(chosen, kind="stable")
        experts, when = chosen[order], at[order]
        first = np.r_[True, experts[1:] != experts[:-1]]
        before = np.empty(len(chosen), np.int64)
        before[order] = np.where(first, self._last[experts], np.r_[LONG_AGO, when[:-1]])
        last = np.r_[first[1:], True]
        self._last[experts[last]] = when[last]
        for i, lag in enumerate(LAGS):  # a row that has no `lag` rows before it says nothing about that lag
            self._fresh[i] += np.count_nonzero((at - before > lag) & (at >= lag))
        self.rows += rows

    def fresh(self) -> tuple[float, ...] | None:
        """[lag]: share of the selections whose expert no one of the last LAGS[i] rows had selected; None when there
        are too few rows. Lags that no row reached have the last known share. It never grows with the lag."""
        if self.rows < ENOUGH_ROWS:
            return None
        out, least = [], 1.0
        for fresh, lag in zip(self._fresh.tolist(), LAGS, strict=True):
            if self.rows - lag >= ENOUGH_ROWS // 2:
                least = min(least, fresh / (self._top_k * (self.rows - lag)))
            out.append(least)
        return tuple(out)


def reuse_of(trace: Trace) -> Reuse | None:
    """Of the rows of a trace that ran alone, one after another; None when they are too few."""
    alone = trace.ids[np.bincount(trace.step)[trace.step] == 1]
    layers = []
    for layer in range(alone.shape[1]):
        layers.append(ReuseCounts(trace.header.num_experts, trace.header.top_k))
        layers[-1].add(alone[:, layer])
    return over_layers([counts.fresh() for counts in layers])


def over_layers(fresh: Sequence[tuple[float, ...] | None]) -> Reuse | None:
    """Shares of every layer, where one is not known the mean of the others; None when none is known."""
    known = [row for row in fresh if row is not None]
    if not known:
        return None
    mean = tuple(np.minimum.accumulate(np.mean(known, axis=0)).tolist())
    return tuple(mean if row is None else row for row in fresh)


def chance_fresh(frequencies: Floats, rows: NDArray[np.integer]) -> Floats:
    """[len(rows)]: share of selections whose expert was not selected in so many independent rows before:
    sum_e p_e (1 - p_e)^d / K. `frequencies`: [E]."""
    p = np.clip(frequencies, 0.0, 1.0)
    return (p * (1 - p) ** rows[:, None]).sum(axis=1) / max(p.sum(), 1e-300)


def expected_misses(
    loose: Floats, slots: int, frequencies: Floats, fresh: Sequence[float] | None, rows: int = 1
) -> float:
    """Expected demand misses (m of (3)) of a step in one layer: `slots` under LRU, for experts that nobody holds.

    By the formulation's proposition LRU misses what was not used in the last D steps, D being how many steps it takes
    to use as many distinct experts as there are slots; for these the working set's expectation stands (Denning, Che).
    An expert of frequency p is not used for D steps of r independent rows with chance (1 - p)^(r D). Reuse changes that
    by the factor by which it changes it over the whole layer.

    Args:
        loose: [n] frequencies of the experts that share the slots.
        slots: C.
        frequencies: [E] of the layer.
        fresh: of the layer, see `ReuseCounts.fresh`; None: rows do not depend on the rows before.
        rows: in a step (r), each of a sequence of its own.
    """
    if slots >= len(loose):
        return 0.0
    back = np.arange(LAGS[-1] + 1)
    absent = (1 - np.clip(loose, 0.0, 1.0)) ** rows
    misses = ((1 - absent) * absent ** back[:, None]).sum(axis=1)
    if fresh is not None:
        misses *= _seen(back, fresh) / np.maximum(chance_fresh(frequencies, back), 1e-300)
    misses = np.minimum.accumulate(misses)
    used = np.concatenate(([0.0], np.cumsum(misses[:-1])))  # distinct experts of so many steps
    return float(np.interp(slots, used, misses))


def _seen(back: Ints, fresh: Sequence[float]) -> Floats:
    """The measured shares at every lag: between two of LAGS a share falls by the same part with every row."""
    shares = np.log(np.maximum((1.0, *fresh), 1e-12))
    return np.exp(np.interp(back, (0, *LAGS), shares))
