"""The least priced cost of a layer over all shares, by branch and bound over boxes of shares.

In a box the chance to be done is at most (t x)^K, t from the tangent of the concave K-th root at the middle, and t x
runs between two ends, so that a chord bounds the power by a line. The priced memory is convex in the shares and bounded
by its tangent. What is left is linear, a knapsack. It knows shares and prices, no nodes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.placement.routing import prefix_polynomials
from titan.placement.solver.fitting import Fitting

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BATCH = 256
TINY = 1e-300


class Ranked:
    """A layer's experts by weight (mean 1): how many experts a share can be, at least and at most."""

    def __init__(self, weights: Floats, top_k: int) -> None:
        down = np.sort(weights)[::-1]
        self.heavy = np.concatenate([[0.0], np.cumsum(down)])
        self.light = np.concatenate([[0.0], np.cumsum(down[::-1])])
        self.inverse = 1.0 / np.concatenate([down, down[-1:]])
        self.experts, self.lightest = len(down), float(down[-1])
        self.flat = bool(down[0] == down[-1])
        whole = prefix_polynomials(down, top_k)[-1]
        self.ratio = float(whole[top_k - 1] / whole[top_k])

    def most(self, share: Floats) -> Floats:
        """The most experts that weigh no more than `share`."""
        counts = np.searchsorted(self.light, share * (1 + 1e-12) + 1e-12, side="right") - 1
        return counts.astype(np.float64)

    def spared(self, share: Floats) -> Floats:
        """Most likely chance that none of the experts that weigh `share` is selected: e_K(rest) / e_K is at most
        1 / (1 + share e_{K-1} / e_K), as e_{K-1} / e_K falls in every weight (Newton's inequalities)."""
        return 1.0 / (1.0 + share * self.ratio)

    def least(self, share: Floats) -> tuple[Floats, Floats]:
        """(convex bound on the number of experts that weigh `share`, its slope)."""
        count = np.clip(np.searchsorted(self.heavy, share, side="right") - 1, 0, self.experts)
        slope = self.inverse[count]
        return count + (share - self.heavy[count]) * slope, slope


@dataclass(frozen=True, slots=True)
class Priced:
    """A layer at prices.

    Args:
        fitting: pieces of time and rooms by column; the last column is of experts in no memory.
        price_s: [columns] seconds a slot, 0 for the last.
    """

    fitting: Fitting
    ranked: Ranked
    price_s: Floats

    def memory(self, share: Floats) -> tuple[Floats, Floats]:
        """([cells] least priced slots that give `share` [columns, cells], [columns, cells] its slopes): the dearest
        slots hold the heaviest experts."""
        order = np.argsort(-self.price_s, kind="stable")
        drop = self.price_s[order] - np.append(self.price_s[order][1:], 0.0)
        counts, slopes = self.ranked.least(np.cumsum(share[order], axis=0))
        back = np.empty_like(slopes)
        back[order] = np.cumsum((drop[:, None] * slopes)[::-1], axis=0)[::-1]
        return drop @ counts, back

    def cost(self, share: Floats) -> tuple[Floats, Floats, Floats]:
        """([cells] expected seconds, [cells] priced slots, [columns, cells] slopes of their sum) at points."""
        chance, slopes = self.fitting.chances(share, np.maximum(share, 1.0))
        unread, length_s = self.fitting.room[:, -1:] == 0, self.fitting.length_s
        spared = self.ranked.spared(share[-1])
        cap = np.where(unread, spared, 1.0)
        open_ = np.where(chance < cap, length_s[:, None], 0.0)
        seconds = length_s @ (1.0 - np.minimum(chance, cap))
        priced, move = self.memory(share)
        move = move - np.einsum("pc,npc->nc", open_, slopes)
        move[-1] += (unread * (length_s[:, None] - open_)).sum(axis=0) * self.ranked.ratio * spared**2
        return seconds, priced, move


@dataclass(frozen=True, slots=True)
class Boxes:
    """low, high [columns, cells]; no shares inside cost less than least_s [cells]; the column to cut, and where."""

    low: Floats
    high: Floats
    least_s: Floats
    split: Ints
    at: Floats

    def take(self, which: NDArray) -> Boxes:
        return Boxes(self.low[:, which], self.high[:, which], self.least_s[which], self.split[which], self.at[which])

    @staticmethod
    def joined(parts: list[Boxes]) -> Boxes:
        return Boxes(
            np.concatenate([p.low for p in parts], axis=1),
            np.concatenate([p.high for p in parts], axis=1),
            *(np.concatenate([getattr(p, name) for p in parts]) for name in ("least_s", "split", "at")),
        )


def bounded(priced: Priced, low: Floats, high: Floats) -> Boxes:
    """The boxes with their bounds. Boxes without a point that sums to the layer's weight are left out."""
    total = priced.ranked.heavy[-1]
    if priced.ranked.flat:  # shares are whole numbers of experts
        low, high = np.ceil(low - 1e-6), np.floor(high + 1e-6)
    fits = (low <= high).all(axis=0)
    fits &= (low.sum(axis=0) <= total * (1 + 1e-12)) & (high.sum(axis=0) >= total * (1 - 1e-12))
    low, high = low[:, fits], high[:, fits]
    # what the others must leave, and must take
    high = np.minimum(high, total - (low.sum(axis=0) - low))
    low = np.maximum(low, total - (high.sum(axis=0) - high))
    high = np.maximum(high, low)
    width = high - low
    room = total - low.sum(axis=0)
    middle = low + width * (room / np.maximum(width.sum(axis=0), TINY))
    fitting, top_k = priced.fitting, priced.fitting.top_k
    most = priced.ranked.most(high)
    chance, slopes = fitting.chances(middle, most)
    root = np.maximum(chance, 0.0) ** (1.0 / top_k)
    live = chance > 1e-250
    tangent = np.where(live, slopes * (root / (top_k * np.maximum(chance, TINY))), 0.0)  # [columns, pieces, cells]
    least, largest = _ends(tangent, low, width, room)
    unread = fitting.room[:, -1:] == 0
    lightly, heavily = priced.ranked.spared(low[-1]), priced.ranked.spared(high[-1])
    cap = np.where(unread, lightly, 1.0)
    ceiling = cap ** (1.0 / top_k)
    certain = least >= ceiling
    largest = np.minimum(largest, ceiling)
    spread = np.maximum(largest - least, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        chord = np.where(
            spread > 1e-9, (largest**top_k - least**top_k) / np.maximum(spread, TINY), top_k * largest ** (top_k - 1)
        )
    offset = np.maximum(largest**top_k - chord * largest, least**top_k - chord * least)  # `certain` below
    chord, offset = np.where(certain, 0.0, chord), np.where(certain, cap, offset)
    chord, offset = np.where(live, chord, 0.0), np.where(live, offset, 0.0)
    fall = np.where(unread, (heavily - lightly) / np.maximum(width[-1], TINY), 0.0)  # convex, so that a chord bounds it
    line = cap + fall * (middle - low)[-1]
    lined = live & (line < offset + chord * root)
    chord, offset = np.where(lined, 0.0, chord), np.where(lined, cap - fall * low[-1], offset)
    fall = np.where(lined, fall, 0.0)
    length = fitting.length_s
    reward = np.einsum("p,pc,npc->nc", length, chord, tangent)
    reward[-1] += length @ fall
    money, move = priced.memory(middle)
    constant = length.sum() - length @ offset + money - (move * middle).sum(axis=0)
    slope = move - reward
    order = np.argsort(slope, axis=0, kind="stable")
    given = _dealt(np.take_along_axis(width, order, axis=0), room)
    least_s = constant + (slope * low).sum(axis=0) + (np.take_along_axis(slope, order, axis=0) * given).sum(axis=0)
    mean = (tangent * middle[:, None, :]).sum(axis=0) / total  # what a column's slope differs from
    uneven = np.abs(tangent - mean) * width[:, None, :]
    loose = length[:, None] * np.maximum(offset + chord * root + fall * middle[-1] - np.minimum(chance, cap), 0.0)
    score = np.einsum("pc,npc->nc", loose / np.maximum(uneven.sum(axis=0), TINY), uneven)
    crowd = np.maximum(1.0 / np.maximum(priced.ranked.most(middle), 1.0) - 1.0 / np.maximum(most, 1.0), 0.0)
    score += length @ np.minimum(chance, cap) * (top_k * middle / total) ** 2 / 2 * crowd
    split = np.argmax(np.where(width > 1e-6 * total, score, -1.0), axis=0)
    at = np.take_along_axis(middle, split[None], axis=0)[0]
    return Boxes(low, high, least_s, split, at)


def _ends(tangent: Floats, low: Floats, width: Floats, room: Floats) -> tuple[Floats, Floats]:
    """[pieces, cells] least and largest tangent times share in every box."""
    order = np.argsort(tangent, axis=0, kind="stable")
    rising = np.take_along_axis(tangent, order, axis=0)
    wide = np.take_along_axis(np.broadcast_to(width[:, None, :], tangent.shape), order, axis=0)
    base = np.einsum("npc,nc->pc", tangent, low)
    least = base + (rising * _dealt(wide, room)).sum(axis=0)
    largest = base + (rising[::-1] * _dealt(wide[::-1], room)).sum(axis=0)
    return np.maximum(least, 0.0), largest


def _dealt(width: Floats, room: Floats) -> Floats:
    """`room` given to the first columns as far as they are wide."""
    before = np.cumsum(width, axis=0) - width
    return np.clip(room - before, 0.0, width)


def certify(
    priced: Priced, roots: list[tuple[Floats, Floats]], target_s: float, deadline: float, cells: int
) -> tuple[float, Floats]:
    """(no shares in the boxes `roots` cost less than this, at most `target_s`; [columns, n] promising shares).

    Stops when everything below `target_s` is excluded, after `cells` boxes, or at `deadline` with what is proven.
    """
    low, high = (np.stack(side, axis=1) for side in zip(*roots, strict=True))
    open_ = bounded(priced, low, high)
    seen, done = open_.low.shape[1], target_s
    while True:
        open_ = open_.take(open_.least_s < target_s)
        if not len(open_.least_s):
            return done, np.zeros((len(priced.price_s), 0))
        if seen > cells or time.monotonic() > deadline:
            worst = np.argsort(open_.least_s)[:8]
            return min(done, float(open_.least_s.min())), (open_.low[:, worst] + open_.high[:, worst]) / 2
        order = np.argsort(open_.least_s, kind="stable")
        first, rest = open_.take(order[:BATCH]), open_.take(order[BATCH:])
        columns = np.arange(len(first.split))
        left_high, right_low = first.high.copy(), first.low.copy()
        left_high[first.split, columns] = first.at
        right_low[first.split, columns] = first.at if not priced.ranked.flat else np.floor(first.at) + 1
        made = bounded(
            priced, np.concatenate([first.low, right_low], axis=1), np.concatenate([left_high, first.high], axis=1)
        )
        seen += made.low.shape[1]
        parent = float(first.least_s.min())  # a box is no worse than what it was cut from
        made = Boxes(made.low, made.high, np.maximum(made.least_s, parent), made.split, made.at)
        open_ = Boxes.joined([rest, made])
