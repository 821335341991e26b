"""How much every node can run by a time, and how likely it is that a layer's selected experts find room by then.

Time up to the first SSD read is cut into pieces in which no node's room grows; pieces belong to levels: level i begins
when the i-th nearest class of workers can be done with its first expert. It knows figures, no experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.placement.cost import Costs
from titan.placement.solver.classes import WorkerClass

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAX_PIECES = 16  # a level; more are merged, each taking the room at its end
MAX_PACKED_TOP_K = 16  # above it only the total room counts
ROUNDS = 60
SLIVER = 0.02  # of the time node 0 needs for a whole row


@dataclass(frozen=True, slots=True)
class Level:
    """The pieces of one level.

    Attributes:
        length_s: [pieces] seconds.
        home: [pieces] experts node 0 can have run by then (at most K).
        room: [pieces] experts all workers together can have run.
        most: [pieces] the largest room of one worker; `usable` [pieces] workers with any.
        packed: [pieces, K + 1] chance that r experts, each at worker n with chance q_n, find room, for the best q.
    """

    length_s: Floats
    home: Ints
    room: Ints
    most: Ints
    usable: Ints
    packed: Floats


def levels(costs: Costs, classes: list[WorkerClass], top_k: int) -> list[Level]:
    """One level before any worker is done, one from every class on; the last ends where an SSD read could be done."""
    workers = [n for c in classes for n in c.members]
    return _levels(costs, classes, top_k, [np.arange(len(workers))] * (len(classes) + 1))


def own_levels(costs: Costs, classes: list[WorkerClass], top_k: int) -> list[Level]:
    """The same times with the room of the level's own class alone, nearer nodes' being unlimited."""
    edges = np.cumsum([0, *(len(c.members) for c in classes)])
    own = [np.arange(0), *(np.arange(a, b) for a, b in pairwise(edges))]
    return [replace(level, home=np.full_like(level.home, top_k)) for level in _levels(costs, classes, top_k, own)]


def _levels(costs: Costs, classes: list[WorkerClass], top_k: int, counted: list[Ints]) -> list[Level]:
    workers = [n for c in classes for n in c.members]
    counts = np.arange(1, top_k + 1)
    times = np.array([costs.base_s[n] + costs.pair_s[n] * counts for n in (0, *workers)])
    starts = [0.0, *(c.theta_s for c in classes), costs.ssd_s]
    out = []
    for start, end, these in zip(starts[:-1], starts[1:], counted, strict=True):
        length, room = pieces(times, start, min(end, costs.ssd_s))
        busy = room[:, 1:][:, these]
        most, usable = busy.max(axis=1, initial=0), (busy > 0).sum(axis=1)
        out.append(Level(length, room[:, 0], busy.sum(axis=1), most, usable, _packed(busy, top_k)))
    return out


def split(level: Level, top_k: int, home_s: float) -> tuple[Level, Level]:
    """(pieces in which node 0 cannot have run everything, the others); a sliver of the former counts as the latter."""
    narrow = level.home < top_k
    if level.length_s[narrow].sum() <= SLIVER * home_s:
        narrow[:] = False
    return _part(level, narrow, level.home), _part(level, ~narrow, np.full_like(level.home, top_k))


def _part(level: Level, take: NDArray[np.bool_], home: Ints) -> Level:
    return Level(
        level.length_s[take], home[take], level.room[take], level.most[take], level.usable[take], level.packed[take]
    )


def pieces(times: NDArray[Any], start: float, end: float, most: int = MAX_PIECES) -> tuple[Floats, Ints]:
    """([pieces] seconds, [pieces, nodes] room) between two instants."""
    if end <= start:
        return np.zeros(0), np.zeros((0, len(times)), dtype=np.int64)
    inside = times[(times > start) & (times < end)]
    edges = np.unique(np.concatenate([[start], inside, [end]]))
    if len(edges) - 1 > most:
        wanted = np.linspace(start, end, most + 1)
        edges = np.unique(edges[np.clip(np.searchsorted(edges, wanted), 0, len(edges) - 1)])
    last = np.array([np.max(times[times < b], initial=0.0) for b in edges[1:]])
    reached = np.maximum(edges[:-1], last)
    room = (times[None] <= reached[:, None, None] * (1 + 1e-12)).sum(axis=2)
    return np.diff(edges), room


def _packed(room: Ints, top_k: int) -> Floats:
    """[pieces, K + 1] see `Level.packed`.

    The chance is r! times a polynomial in q whose exponents fill a box, a Lorentzian one (Braenden and Huh 2020): its
    r-th root is concave, so that growth transforms (Baum and Eagon) climb to the maximum, and at any q the gradient
    bounds it: max f <= f(q) (max_n f_n(q) / (r f(q)))^r.
    """
    pieces, workers = room.shape
    out = np.zeros((pieces, top_k + 1))
    out[:, 0] = 1.0
    total = room.sum(axis=1)
    if not workers or not pieces or top_k > MAX_PACKED_TOP_K:
        out[:, 1:] = np.arange(1, top_k + 1)[None, :] <= total[:, None]
        return out
    powers = np.arange(top_k + 1)
    wanted = np.tile(np.arange(1, top_k + 1), pieces)
    caps = np.repeat(room, top_k, axis=0)
    live = wanted <= caps.sum(axis=1)
    wanted, caps = wanted[live], caps[live]
    inverse = 1.0 / np.array([math.factorial(k) for k in powers], dtype=np.float64)
    allowed = (powers[None, None, :] <= caps[:, :, None]) * inverse  # [problems, workers, K + 1]
    lowered = (powers[None, None, :] < caps[:, :, None]) * inverse
    share = np.minimum(caps, wanted[:, None]).astype(np.float64)
    share /= share.sum(axis=1, keepdims=True)
    best = np.full(len(wanted), np.inf)
    rows, factorial = np.arange(len(wanted)), 1.0 / inverse[wanted]
    for _ in range(ROUNDS if workers <= 16 else ROUNDS // 4):
        power = share[:, :, None] ** powers
        value, gradient = _with_gradient(allowed * power, lowered * power, rows, wanted)
        ratio = gradient / (wanted * value)[:, None]
        best = np.minimum(best, factorial * value * ratio.max(axis=1) ** wanted)
        share = share * ratio
        share /= share.sum(axis=1, keepdims=True)
    flat = np.zeros(pieces * top_k)
    flat[live] = np.minimum(best, 1.0)
    out[:, 1:] = flat.reshape(pieces, top_k)
    return out


def _with_gradient(terms: Floats, lowered: Floats, rows: Ints, wanted: Ints) -> tuple[Floats, Floats]:
    """(coefficient `wanted` of the product of each row's polynomials, its derivatives by every worker's share)."""
    problems, workers, size = terms.shape
    before = np.zeros((workers + 1, problems, size))
    after = np.zeros((workers + 1, problems, size))
    before[0, :, 0] = after[workers, :, 0] = 1.0
    for n in range(workers):
        before[n + 1] = _multiply(before[n], terms[:, n])
        after[workers - 1 - n] = _multiply(after[workers - n], terms[:, workers - 1 - n])
    gradient = np.empty((problems, workers))
    for n in range(workers):
        others = _multiply(before[n], lowered[:, n])
        column = np.arange(size)[None, :]
        back = wanted[:, None] - 1 - column
        right = np.where(back >= 0, np.take_along_axis(after[n + 1], np.maximum(back, 0), axis=1), 0.0)
        gradient[:, n] = (others * right).sum(axis=1)
    return before[workers][rows, wanted], gradient


def _multiply(left: Floats, right: Floats) -> Floats:
    """Row-wise product of polynomials [rows, size], cut at the same degree."""
    out = left * right[:, :1]
    for k in range(1, left.shape[1]):
        out[:, k:] += left[:, :-k] * right[:, k : k + 1]
    return out
