"""The certified bound by shares: every node by itself, prices by column generation, certified by branch and bound.

Looks at all pieces of time together, so that it is tight where workers are unlike, or all about equally near. It knows
figures, weights and capacities, no arrangement.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from titan.placement.evaluate import Evaluator
from titan.placement.solver.cells import Priced, Ranked, certify
from titan.placement.solver.classes import usable_bytes
from titan.placement.solver.fitting import Fitting
from titan.placement.solver.highs import INFINITY, Highs
from titan.placement.solver.rooms import pieces

Floats = NDArray[np.float64]
MAX_PIECES = 64
MAX_TOP_K, MAX_KINDS, MAX_NODES = 16, 4, 16
ROUNDS, STEPS = 40, 15
CELLS, CELLS_AN_EXPERT, CERTIFIED = 50_000, 400, 2  # boxes at a price; prices tried
SETTLED = 2e-4  # of all: what a round gains when prices are good enough
NEAR = 8e-3  # of a layer's cost: what branch and bound leaves open
ENOUGH = 1.2e-2  # of all: what further prices could gain when the bound ends
LOST = 5e-4  # of all: what raised prices may lose
READ = 0.7
RAISED = 3.0  # times a layer's cost an expert: prices are raised by that at most


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers with the same weights and expert size."""

    fitting: Fitting
    ranked: Ranked
    layers: int
    slot: float


class Shares:
    """One problem's kinds of layers and capacities; columns are node 0, the workers, free experts, missing ones."""

    def __init__(self, evaluator: Evaluator, kinds: list[tuple[int, int, int]]) -> None:
        """`kinds`: (a layer, how many layers are like it, expert bytes)."""
        problem, costs, top_k = evaluator.problem, evaluator.costs, evaluator.top_k
        self.nodes = [
            0,
            *(n for n in range(1, len(problem.nodes)) if usable_bytes(problem, n) >= min(problem.expert_bytes)),
        ]
        counts = np.arange(1, top_k + 1)
        times = np.array([costs.base_s[n] + costs.pair_s[n] * counts for n in self.nodes])
        length_s, room = pieces(times, 0.0, costs.ssd_s, MAX_PIECES)
        able = np.minimum(room.sum(axis=1), top_k)
        self.idle_s = float(length_s[able < top_k].sum())  # nothing can be done by then
        length_s, room, able = length_s[able >= top_k], room[able >= top_k], able[able >= top_k]
        room = np.concatenate([room, able[:, None], np.zeros((len(room), 1), dtype=np.int64)], axis=1)
        rounds = np.arange(1, -(-top_k // costs.readers))  # after so many reads, each of `readers` experts
        reading = np.full((len(rounds), room.shape[1]), top_k)
        reading[:, -1] = rounds * costs.readers
        room, length_s = np.concatenate([room, reading]), np.append(length_s, np.full(len(rounds), costs.ssd_s))
        self.unit, self.sync_s, self.top_k = max(problem.expert_bytes), problem.sync_s, top_k
        self.capacity = np.array([usable_bytes(problem, n) / self.unit for n in self.nodes])
        self.kinds = []
        for layer, layers, size in kinds:
            weights = evaluator.weights[layer]
            every = np.arange(len(weights))
            fitting = Fitting(length_s, room, top_k, float(evaluator.polynomial(layer, every)[top_k]))
            self.kinds.append(Kind(fitting, Ranked(weights, top_k), layers, size / self.unit))

    def priced(self, kind: Kind, price: Floats) -> Priced:
        """`price`: [nodes] seconds of a unit of memory."""
        slots = price * kind.slot
        cheap = np.sort(slots)
        return Priced(kind.fitting, kind.ranked, np.concatenate([slots, [cheap[:2].sum(), 0.0]]))

    def bound(self, above_s: float, deadline: float, cells: int | None = None) -> float | None:
        """Seconds that the experts of all layers take at least; None where it could not exceed `above_s`.

        Stops at `deadline` (time.monotonic()) with what is proven by then. `cells`: boxes looked at a price.
        """
        cells = cells or min(CELLS, CELLS_AN_EXPERT * max(k.ranked.experts for k in self.kinds))
        master, price = _Master(self), np.zeros(len(self.nodes))
        value, before, duals = 0.0, np.inf, np.zeros(len(self.kinds))
        for round_ in range(ROUNDS):
            new = [master.learn(i, kind, price, first=not round_) for i, kind in enumerate(self.kinds)]
            value, price, duals = master.run()
            settled = round_ > 1 and before - value < SETTLED * value
            if (round_ and not any(new)) or settled or time.monotonic() > deadline:
                break
            before = value
        if value <= above_s:
            return None
        best = 0.0
        for _ in range(CERTIFIED):
            total, found = self._certified(value, price, duals, deadline, cells)
            best = max(best, total)
            new = [
                master.add(i, kind, self.priced(kind, price), shares) | master.learn(i, kind, price, first=False)
                for i, (kind, shares) in enumerate(zip(self.kinds, found, strict=True))
            ]
            value, price, duals = master.run()
            if best >= value * (1 - ENOUGH) or not any(new) or time.monotonic() > deadline:
                break
        return best

    def _certified(
        self, value: float, price: Floats, duals: Floats, deadline: float, cells: int
    ) -> tuple[float, list[Floats]]:
        """(bound at about these prices, promising shares of every kind).

        All prices are raised by what next to nothing is lost by, so that no second holder seems worth a slot.
        """
        layers = sum(k.layers for k in self.kinds)
        spare = float(self.capacity.sum()) - sum(k.layers * k.slot * k.ranked.experts for k in self.kinds)
        experts = max(k.ranked.experts for k in self.kinds)
        more = min(LOST * value / max(spare, 1e-9), RAISED * value / layers / experts) if spare >= 0 else 0.0
        read_s = float(self.kinds[0].fitting.length_s.sum())  # counted for a layer in no memory: it must stay dear
        more = min(more, max(0.0, READ * read_s / experts - float(price.max())))
        price = price + more
        total, out = -float(price @ self.capacity), []
        for kind, dual in zip(self.kinds, duals.tolist(), strict=True):
            goal = dual + more * kind.slot * kind.ranked.experts - NEAR * value / layers
            least, found = self._layer(kind, self.priced(kind, price), goal - self.idle_s, deadline, cells)
            total += kind.layers * (least + self.idle_s)
            out.append(found)
        return total, out

    def _layer(self, kind: Kind, priced: Priced, goal_s: float, deadline: float, cells: int) -> tuple[float, Floats]:
        """(least priced seconds of a layer or `goal_s`, promising shares): all at home, or not and synchronised."""
        ranked, columns = kind.ranked, len(priced.price_s)
        total, free, missing = float(ranked.heavy[-1]), columns - 2, columns - 1
        at_home = priced.price_s.copy()  # a second holder is a worker then
        at_home[free] = at_home[0] + at_home[1:free].min()
        low, high = np.zeros(columns), np.zeros(columns)
        high[[0, free]] = total
        whole_s, _ = certify(replace(priced, price_s=at_home), [(low, high)], goal_s, deadline, cells)
        roots = []
        for copies, gone in itertools.product((False, True), repeat=2):
            low, high = np.zeros(columns), np.full(columns, total)
            high[0] = total - ranked.lightest
            for column, some in ((free, copies), (missing, gone)):
                low[column], high[column] = (ranked.lightest, total) if some else (0.0, 0.0)
            if not copies:
                low[0] = ranked.light[min(self.top_k, ranked.experts - 1)]  # node 0 keeps top-k slots
            roots.append((low, high))
        least_s, found = certify(priced, roots, goal_s - self.sync_s, deadline, cells)
        return min(whole_s, least_s + self.sync_s), found


class _Master:
    """Columns with their estimated costs; prices that make the layers' least priced cost as large as possible."""

    def __init__(self, shares: Shares) -> None:
        self.shares, self._highs, self._known = shares, Highs(), set()
        for kind in shares.kinds:
            self._highs.row(float(kind.layers), float(kind.layers))
        for most in shares.capacity:
            self._highs.row(-INFINITY, float(most))
        self.best: list[list[Floats]] = [[] for _ in shares.kinds]

    def learn(self, number: int, kind: Kind, price: Floats, *, first: bool) -> bool:
        """Descend from many shares at these prices; True when a new column came."""
        priced = self.shares.priced(kind, price)
        if first:
            start = _starts(float(kind.ranked.heavy[-1]), len(priced.price_s))
            self.add(number, kind, priced, start)
        else:
            start = np.stack(self.best[number][-32:], axis=1)
        return self.add(number, kind, priced, _descended(priced, start, kind.ranked.heavy[-1]))

    def add(self, number: int, kind: Kind, priced: Priced, share: Floats) -> bool:
        seconds, _, _ = priced.cost(share)
        total = kind.ranked.heavy[-1]
        order = np.argsort(-priced.price_s, kind="stable")
        counts, _ = kind.ranked.least(np.cumsum(share[order], axis=0))
        slots = np.empty_like(share)
        slots[order] = np.diff(counts, axis=0, prepend=0.0)
        cost = seconds + self.shares.idle_s + np.where(share[0] + share[-2] < total * (1 - 1e-9), self.shares.sync_s, 0)
        value = cost + priced.price_s @ slots
        cheap = np.argsort(priced.price_s[:-2])[:2]
        new = False
        for i in np.argsort(value)[:16].tolist() if self.best[number] else range(share.shape[1]):
            key = (number, *np.round(slots[:, i], 2).tolist())
            if key in self._known:
                continue
            self._known.add(key)
            new = True
            used = slots[:-2, i].copy()
            used[cheap] += slots[-2, i]
            terms = {number: 1.0} | {
                len(self.shares.kinds) + n: float(u * kind.slot) for n, u in enumerate(used) if u > 1e-9
            }
            self._highs.column(float(cost[i]) * 1e3, terms=terms)
            self.best[number].append(share[:, i])
        return new

    def run(self) -> tuple[float, Floats, Floats]:
        self._highs.run()
        duals = np.array(self._highs.getSolution().row_dual) / 1e3
        kinds = len(self.shares.kinds)
        value = float(self._highs.getInfo().objective_function_value) / 1e3
        return value, np.maximum(-duals[kinds:], 0.0), duals[:kinds]


def _starts(total: float, columns: int) -> Floats:
    """[columns, n]: all at home; parts at home and the rest over the nearest workers, evenly and by speed."""
    out = [np.eye(columns)[0], np.eye(columns)[-1]]
    workers = columns - 3
    profiles = []
    for used in range(1, workers + 1):
        flat = np.zeros(columns)
        flat[1 : 1 + used] = 1 / used
        profiles.append(flat)
        profiles.append(np.eye(columns)[used])
    for home in (0.02, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9):
        for profile in profiles:
            one = (1 - home) * profile
            one[0] += home
            out.append(one)
    return np.stack(out, axis=1) * total


def _descended(priced: Priced, share: Floats, total: float) -> Floats:
    """Mirror descent on every column of `share`."""
    best, best_value = share.copy(), np.full(share.shape[1], np.inf)
    step = np.full(share.shape[1], 0.5)
    for _ in range(STEPS):
        seconds, money, slope = priced.cost(share)
        value = seconds + money
        better = value < best_value
        best = np.where(better, share, best)
        best_value = np.where(better, value, best_value)
        step = np.where(better, step * 1.1, step * 0.5)
        share = np.where(better, share, best)
        scale = total / np.maximum(np.abs(value), 1e-12)
        share = share * np.exp(np.clip(-step * (slope - slope.mean(axis=0)) * scale, -3, 3))
        share = share * (total / share.sum(axis=0))
    return best
