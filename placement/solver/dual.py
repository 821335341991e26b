"""The certified bound: prices of memory that make the layers' separate minima as large as possible.

Lagrangian dual of (mem) over per-layer choices, solved by column generation with HiGHS. At any prices, the sum of the
layers' priced minima less the priced capacities bounds every placement from below; the best such value is returned.
It knows layer tables and capacities, not experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.placement.solver.highs import INFINITY, Highs
from titan.placement.solver.layer_bound import LayerBound
from titan.placement.solver.pricing import Column, cheapest

Floats = NDArray[np.float64]
MAX_ROUNDS = 200
ENOUGH = 2e-4  # of the bound: what the master could still gain when the rounds end


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with the same tables: how many, and how large an expert is there.

    Args:
        table: None where the time did not suffice to make it; the layers then count with `floor_s`.
        floor_s: no layer costs less, wherever its experts are.
    """

    table: LayerBound | None
    layers: int
    expert_bytes: int
    floor_s: float


@dataclass(frozen=True, slots=True)
class Dual:
    """Result: the bound on the sum over layers, the prices (home first, seconds a byte), the columns and their use."""

    bound_s: float
    prices: Floats
    columns: list[Column]
    usage: Floats

    @property
    def used(self) -> list[Column]:
        return [c for c, n in zip(self.columns, self.usage, strict=False) if n > 1e-9]


def solve_dual(groups: list[Group], capacity: list[float], deadline: float, start: Floats | None = None) -> Dual:
    """Maximise the bound; the best so far when the time is over, also in the middle of a round.

    Args:
        groups: kinds of layers.
        capacity: bytes of node 0, then of every class of workers.
        deadline: time.monotonic() value to stop at.
        start: prices to begin with (seconds a byte); those of a similar problem save rounds.
    """
    unit = max(g.expert_bytes for g in groups)
    master = _Master(groups, [c / unit for c in capacity], unit)
    best = Dual(sum(g.layers * g.floor_s for g in groups), np.zeros(len(capacity)), master.columns, np.zeros(0))
    for kind, group in enumerate(groups):
        for column in _first(kind, group, len(capacity)):
            master.add(column)
    usage, waiting = np.zeros(0), [np.zeros(len(capacity)), *([] if start is None else [start * unit])]
    for _ in range(MAX_ROUNDS):
        reachable = np.inf
        if waiting:
            prices, duals = waiting.pop(), None
        else:
            usage, prices, duals, reachable = master.run()
        priced = _price(groups, prices, unit, deadline)
        if priced is None:
            break
        bound, found = priced
        bound -= float(np.dot(prices, master.capacity))
        if bound > best.bound_s:
            best = Dual(bound, prices / unit, master.columns, usage)
        improving = sum(master.add(column) for column in found)
        if duals is not None and (not improving or reachable - best.bound_s < ENOUGH * abs(best.bound_s)):
            break
    return Dual(best.bound_s, best.prices, master.columns, usage)


def _price(groups: list[Group], prices: Floats, unit: int, deadline: float) -> tuple[float, list[Column]] | None:
    """(sum of the layers' priced minima, divisions that attain them); None when the time is over before the last."""
    total, columns = 0.0, []
    for kind, group in enumerate(groups):
        if time.monotonic() > deadline:
            return None
        if group.table is None:
            total += group.floor_s * group.layers
            continue
        value, found = cheapest(group.table, prices * (group.expert_bytes / unit), kind)
        total += value * group.layers
        columns += found
    return total, columns


def _first(kind: int, group: Group, resources: int) -> list[Column]:
    """Columns that make the master feasible: everything at home, and as much as can be in no memory."""
    table, none, out = group.table, (0,) * (resources - 1), []
    if table is None:
        return [Column(kind, group.floor_s, 0, none, 0)]
    for missing in {0, table.experts - table.top_k}:
        cost = float(table.base[missing])
        cost += sum(float((table.level(i + 1, 0) + table.reads(i + 1))[missing, missing]) for i in range(resources - 1))
        out.append(Column(kind, cost, table.experts - missing, none, missing))
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

    def run(self) -> tuple[Floats, Floats, Floats, float]:
        """(usage of the columns, prices of the resources >= 0, duals of the kinds, objective)"""
        self._highs.run()
        duals = np.array(self._highs.getSolution().row_dual)
        kinds = len(self._groups)
        value = float(self._highs.getInfo().objective_function_value)
        return self._highs.values(), np.maximum(-duals[kinds:], 0.0), duals[:kinds], value
