"""The certified bound: prices of memory that make the layers' separate minima as large as possible.

Lagrangian dual of (mem) over per-layer choices, solved by column generation with HiGHS. At any prices, the sum of the
layers' priced minima less the priced capacities bounds every placement from below; the best such value is returned.
It knows layer tables and capacities, not experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from titan.placement.solver.highs import INFINITY, Highs
from titan.placement.solver.layer_bound import LayerBound

Floats = NDArray[np.float64]
MAX_ROUNDS = 200
MIXES = (0.0, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True, slots=True)
class Column:
    """One way to split a layer: its bound, slots at home, slots a class of workers, experts in no memory."""

    kind: int
    cost_s: float
    home: int
    workers: tuple[int, ...]
    missing: int


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with the same tables: how many, and how large an expert is there."""

    table: LayerBound
    layers: int
    expert_bytes: int


@dataclass(frozen=True, slots=True)
class Dual:
    """Result: the bound on the sum over layers, the prices (home first, seconds a byte), the columns and their use."""

    bound_s: float
    prices: Floats
    columns: list[Column]
    usage: Floats


def solve_dual(groups: list[Group], capacity: list[float], deadline: float) -> Dual:
    """Maximise the bound.

    Args:
        groups: kinds of layers.
        capacity: bytes of node 0, then of every class of workers.
        deadline: time.monotonic() value to stop at; at least one round is done.
    """
    unit = max(g.expert_bytes for g in groups)
    master = _Master(groups, [c / unit for c in capacity], unit)
    for kind, group in enumerate(groups):
        for column in _first(kind, group, len(capacity)):
            master.add(column)
    best_prices = np.zeros(len(capacity))
    best_bound = sum(g.layers * cheapest(g.table, best_prices, kind)[0] for kind, g in enumerate(groups))
    usage = np.zeros(0)
    for _ in range(MAX_ROUNDS):
        usage, prices, duals = master.run()
        bound, improving = -float(np.dot(prices, master.capacity)), 0
        for kind, group in enumerate(groups):
            scale = group.expert_bytes / unit
            value, found = cheapest(group.table, prices * scale, kind)
            bound += value * group.layers
            for column in found:
                reduced = column.cost_s + scale * float(np.dot(prices, (column.home, *column.workers))) - duals[kind]
                if reduced < -1e-9 * max(1e-6, abs(duals[kind])) and master.add(column):
                    improving += 1
        if bound > best_bound:
            best_bound, best_prices = bound, prices / unit
        if not improving or time.monotonic() > deadline:
            break
    return Dual(best_bound, best_prices, master.columns, usage)


def cheapest(table: LayerBound, prices: Floats, kind: int) -> tuple[float, list[Column]]:
    """The least priced cost of a layer over all splits, and the splits that attain it.

    Args:
        prices: seconds a slot: node 0, then every class of workers.
    """
    experts, classes = table.experts, len(prices) - 1
    home_price, worker_prices = float(prices[0]), prices[1:]
    least = int(np.argmin(worker_prices)) if classes else 0
    least_price = float(worker_prices[least]) if classes else 0.0
    sizes = np.arange(experts + 1)
    away = np.minimum(sizes[:, None] + sizes[None, :], experts)
    value, which = np.full(away.shape, np.inf), np.zeros(away.shape, dtype=np.int64)
    for i, (extra, core) in enumerate(zip(table.extra, table.core, strict=True)):
        priced = core + least_price * extra
        which = np.where(priced < value, i, which)
        value = np.minimum(value, priced)
    value += (least_price * sizes)[:, None]
    for mix in MIXES if classes > 1 else (0.0,):
        chain = _walk(table, worker_prices, mix)[-1][away, sizes[None, :]]
        if mix:
            parts = (mix * core + least_price * extra for extra, core in zip(table.extra, table.core, strict=True))
            chain = chain + np.minimum.reduce(list(parts))
        value = np.maximum(value, chain)
    value += home_price * (experts - away)
    at = int(np.argmin(value))
    whole = table.whole_s + home_price * experts
    if whole <= value.flat[at]:
        return whole, [Column(kind, table.whole_s, experts, (0,) * classes, 0)]
    a, s = divmod(at, experts + 1)
    return float(value.flat[at]), _columns(table, worker_prices, kind, a, s, int(which.flat[at]), least)


def _walk(table: LayerBound, prices: Floats, mix: float) -> list[Floats]:
    """[u, s]: priced least of (1 - mix) * chain over the divisions of u - s experts to the classes; one array a level.

    Level by level from the nearest class: entry [u, x] of array i is the least with x experts at levels > i.
    """
    sizes, keep = np.arange(table.experts + 1), 1.0 - mix
    first = float(prices[0]) if len(prices) else 0.0
    arrays = [np.broadcast_to((keep * table.chain_base + first * sizes)[:, None], table.chain[0].shape)]
    for i in range(1, len(prices)):
        here = arrays[-1] + keep * table.chain[i - 1] + float(prices[i] - prices[i - 1]) * sizes
        arrays.append(np.minimum.accumulate(here[:, ::-1], axis=1)[:, ::-1])
    last = float(prices[-1]) if len(prices) else 0.0
    arrays.append(arrays[-1] + keep * table.chain[-1] - last * sizes)
    return arrays


def _columns(table: LayerBound, prices: Floats, kind: int, a: int, s: int, which: int, least: int) -> list[Column]:
    """The splits behind the minimum at (a, s): all of a in the cheapest class, and the chain's own divisions."""
    u, classes = a + s, len(prices)
    if not classes:
        return [Column(kind, max(float(table.core[0][0, s]), _chain_cost(table, u, [u, s])), table.experts - u, (), s)]
    found = []
    for extra, core in {(0, 0): None, (table.extra[which], which): None}:
        use = tuple(a + extra if i == least else 0 for i in range(classes))
        depth = [u if i <= least else s for i in range(classes)] + [s]
        cost = max(float(table.core[core][a, s]), _chain_cost(table, u, depth))
        found.append(Column(kind, cost, table.experts - u, use, s))
    sizes = np.arange(table.experts + 1)
    for mix in MIXES if classes > 1 else ():
        arrays, depth = _walk(table, prices, mix), [s]
        for i in range(classes - 1, 0, -1):
            here = arrays[i - 1][u] + (1 - mix) * table.chain[i - 1][u] + float(prices[i] - prices[i - 1]) * sizes
            depth.insert(0, depth[0] + int(np.argmin(here[depth[0] : u + 1])))
        depth.insert(0, u)
        counts = tuple(x - y for x, y in pairwise(depth))
        cost = max(float(table.core[0][a, s]), _chain_cost(table, u, depth))
        found.append(Column(kind, cost, table.experts - u, counts, s))
    return found


def _chain_cost(table: LayerBound, u: int, depth: list[int]) -> float:
    """`depth`: experts at levels >= 0, 1, ...; the last is those in no memory."""
    return float(table.chain_base[u]) + sum(float(t[u, d]) for t, d in zip(table.chain, depth[1:], strict=True))


def _first(kind: int, group: Group, resources: int) -> list[Column]:
    """Columns that make the master feasible: everything away from memory, and everything at home."""
    table = group.table
    classes, missing = resources - 1, table.experts - table.top_k
    out = [Column(kind, table.whole_s, table.experts, (0,) * classes, 0)]
    if missing:
        out.append(Column(kind, float(table.core[0][0, missing]), table.top_k, (0,) * classes, missing))
    return out


class _Master:
    """The restricted master problem, grown column by column."""

    def __init__(self, groups: list[Group], capacity: list[float], unit: int) -> None:
        self.capacity, self.columns, self._known = np.array(capacity), [], set()
        self._groups, self._unit = groups, unit
        self._highs = Highs()
        for group in groups:
            self._highs.row(float(group.layers), float(group.layers))
        for bytes_ in self.capacity:
            self._highs.row(-INFINITY, float(bytes_))

    def add(self, column: Column) -> bool:
        if column in self._known:
            return False
        self._known.add(column)
        self.columns.append(column)
        scale = self._groups[column.kind].expert_bytes / self._unit
        terms = {column.kind: 1.0}
        for i, used in enumerate((column.home, *column.workers)):
            terms[len(self._groups) + i] = scale * used
        self._highs.column(column.cost_s, terms=terms)
        return True

    def run(self) -> tuple[Floats, Floats, Floats]:
        """(usage of the columns, prices of the resources >= 0, duals of the kinds)"""
        self._highs.run()
        duals = np.array(self._highs.getSolution().row_dual)
        kinds = len(self._groups)
        return self._highs.values(), np.maximum(-duals[kinds:], 0.0), duals[:kinds]
