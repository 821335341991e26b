"""What an arrangement of experts costs: exact expected layer times under the routing model, memoised.

An arrangement is an integer array [moe layer, expert]: MISS (read from node 0's SSD every time it is selected), 0
(local: pinned on node 0, or always found in its cache), or the worker that executes the expert; MISS - n for one that
worker n reads from its own disk every time. It knows problems and arrangements, not how they are searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.placement.cost import Costs
from titan.placement.expected import expected_max, expected_max_reading, expected_stall
from titan.placement.problem import Problem
from titan.placement.reuse import expected_misses
from titan.placement.routing import group_polynomial, inclusion, sample, weights_from_frequencies

MISS = -1
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Expected seconds of one layer's experts: max over nodes (with and without the network), and stall."""

    span_s: float
    compute_s: float
    stall_s: float
    sync_s: float

    @property
    def total_s(self) -> float:
        return self.span_s + self.stall_s + self.sync_s


def executors(row: Ints) -> Ints:
    """The node that executes each expert of an arrangement; node 0 for those that it reads."""
    return np.where(row < MISS, MISS - row, np.maximum(row, 0))


class Evaluator:
    """Expected times of layers of one problem. Holds the routing weights and a memo; values in, values out."""

    def __init__(self, problem: Problem, like: Evaluator | None = None) -> None:
        """`like`: one of a problem with the same frequencies, whose fitted weights are taken over."""
        self.problem = problem
        self.costs = Costs.of(problem.nodes, problem.activation_bytes, reduced=problem.reduced)
        self.top_k = problem.top_k
        self.weights, self.kind = (like.weights, like.kind) if like is not None else _weights(problem)
        self._reuse_ratios: dict[tuple, float] = {}
        self.flat = [bool(np.ptp(w) == 0) for w in self.weights]
        self._prices = _pair_prices(problem)
        self._frequencies: dict[int, Floats] = {}
        self._memo: dict[tuple, float] = {}
        self._spans: dict[tuple, LayerTime] = {}
        self._powers: dict[int, Floats] = {}
        self._routing: dict[tuple[int, int, int, int], Ints] = {}
        self._ranks: dict[tuple[bytes, int, int, int], Ints] = {}

    @property
    def fixed_s(self) -> float:
        """What no placement changes: attention of every MoE layer, and the rest of the step."""
        return sum(self.problem.attention_s) + self.problem.other_s

    def polynomial(self, layer: int, experts: Ints) -> Floats:
        """Group polynomial of `experts` of a layer. [K + 1]"""
        if not self.flat[layer]:
            return group_polynomial(self.weights[layer][experts], self.top_k)
        count = len(experts)
        if count not in self._powers:
            self._powers[count] = group_polynomial(np.ones(count), self.top_k)
        return self._powers[count]

    def layer(self, layer: int, row: Ints, slots: int | None = None) -> float:
        """Expected objective (7) of one layer arranged as `row` [E]: span, stall and synchronisation in seconds, and
        weighted energy and traffic when the problem gives weights. `slots`: node 0's that are not pinned, top-k if not
        given; they matter when the problem tells of reuse."""
        if row.min() < MISS:
            return self._reading(layer, row).total_s + self._weighted(layer, row)
        key = self._key(layer, row, slots)
        if key not in self._memo:
            if len(self._memo) > 200_000:
                self._memo.clear()
            polys, missing, sync = self._groups(layer, row)
            span = expected_max(polys, self.costs.pair_s, self.costs.base_s, self.top_k)
            self._memo[key] = span + sync + self._stall(missing, layer, row, slots) + self._weighted(layer, row)
        return self._memo[key]

    def split(self, layer: int, row: Ints, slots: int | None = None) -> LayerTime:
        """The same with its parts."""
        if row.min() < MISS:
            return self._reading(layer, row)
        key = self._key(layer, row, slots)
        if key not in self._spans:
            polys, missing, sync = self._groups(layer, row)
            span = expected_max(polys, self.costs.pair_s, self.costs.base_s, self.top_k)
            bare = expected_max(polys, self.costs.pair_s, self.costs.fixed_s, self.top_k)
            stall = self._stall(missing, layer, row, slots)
            self._spans[key] = LayerTime(span, min(span, bare), stall, sync)
        return self._spans[key]

    def routing(self, layer: int, steps: int, rows: int, seed: int) -> Ints:
        """Sampled routing of a layer [steps, rows, K], the same each time it is asked for."""
        key = (self.kind[layer], steps, rows, seed)
        if key not in self._routing:
            order = np.argsort(self.weights[layer], kind="stable")
            ids = order[self._ranked(self.weights[layer][order], steps, rows, seed)]
            self._routing[key] = ids.reshape(steps, rows, self.top_k)
        return self._routing[key]

    def _ranked(self, weights: Floats, steps: int, rows: int, seed: int) -> Ints:
        """Sampled ranks [steps * rows, K]: layers whose weights differ in order alone share them."""
        key = (weights.tobytes(), steps, rows, seed)
        if key not in self._ranks:
            rng = np.random.default_rng((seed, rows))
            self._ranks[key] = sample(weights, self.top_k, steps * rows, rng)
        return self._ranks[key]

    def step(self, place: Ints, slots: Sequence[int] | None = None) -> float:
        """Expected step at batch 1 of an arrangement [layers, E]: seconds (5), or (7) when weights are given."""
        return self.fixed_s + sum(
            self.layer(i, row, None if slots is None else slots[i]) for i, row in enumerate(place)
        )

    def misses(self, place: Ints, slots: Sequence[int] | None = None) -> float:
        """Expected experts that a step at batch 1 reads from node 0's SSD."""
        total = 0.0
        for layer, row in enumerate(place):
            drawn = float(self.frequencies(layer)[row == MISS].sum())
            total += drawn * self.reuse_ratio(layer, row, None if slots is None else slots[layer])
        return total

    def busy_s(self, place: Ints) -> Floats:
        """[nodes] expected seconds a node computes experts in a step at batch 1: c_n a pair, and its fixed part."""
        nodes = self.problem.nodes
        busy = np.zeros(len(nodes))
        for layer, row in enumerate(place):
            frequencies = self.frequencies(layer)
            for n in np.unique(executors(row)).tolist():
                mine = executors(row) == n
                chosen = float(frequencies[mine].sum())
                busy[n] += nodes[n].compute_s * chosen + nodes[n].compute_fixed_s * min(1.0, chosen)
        return busy

    def results(self, place: Ints) -> tuple[float, float]:
        """Expected results that come back from workers in a step at batch 1: one a pair, and one a row and worker."""
        pairs = rows = 0.0
        for layer, arranged in enumerate(place):
            row = executors(arranged)
            every = np.arange(len(row))
            ways = self.polynomial(layer, every)[self.top_k]
            pairs += float(self.frequencies(layer)[row > 0].sum())
            for worker in np.unique(row[row > 0]).tolist():
                rows += 1.0 - float(self.polynomial(layer, every[row != worker])[self.top_k] / ways)
        return pairs, rows

    def frequencies(self, layer: int) -> Floats:
        """[E]: how often a row selects each expert of a layer."""
        kind = self.kind[layer]
        if kind not in self._frequencies:
            self._frequencies[kind] = inclusion(self.weights[layer], self.top_k)
        return self._frequencies[kind]

    def _weighted(self, layer: int, row: Ints) -> float:
        """lambda Phi + mu Gamma of a layer, linear in where the (row, expert) pairs run."""
        if self._prices is None:
            return 0.0
        return float(np.dot(self.frequencies(layer), self._prices[executors(row)]))

    def _key(self, layer: int, row: Ints, slots: int | None) -> tuple:
        own = (layer, slots) if self.problem.reuse is not None else ()
        if self.flat[layer] and row.min() >= MISS:
            counts = np.bincount(row + 1, minlength=len(self.problem.nodes) + 1)
            return (counts.tobytes(), *own)
        return (self.kind[layer], row.tobytes(), *own)

    def _groups(self, layer: int, row: Ints) -> tuple[list[Floats], Ints, float]:
        missing = np.flatnonzero(row == MISS)
        home = np.flatnonzero(row <= 0)
        polys = [self.polynomial(layer, home)]
        used = np.unique(row)
        empty = self.polynomial(layer, home[:0])
        polys += [
            self.polynomial(layer, np.flatnonzero(row == n)) if n in used else empty
            for n in range(1, len(self.problem.nodes))
        ]
        whole = len(home) == len(row) and not len(missing)
        return polys, missing, 0.0 if whole else self.problem.sync_s

    def _reading(self, layer: int, row: Ints) -> LayerTime:
        """The parts of a layer in which workers read: theirs count as stall, as far as they make the layer longer."""
        key = (self.kind[layer], row.tobytes())
        if key not in self._spans:
            costs, nodes, top_k = self.costs, self.problem.nodes, self.top_k
            at = executors(row)
            polys = [self.polynomial(layer, np.flatnonzero(at == n)) for n in range(len(nodes))]
            none = self.polynomial(layer, np.flatnonzero(at < 0))
            groups = [(polys[0], none)]
            for n in range(1, len(nodes)):
                mine = (self.polynomial(layer, np.flatnonzero(row == code)) for code in (n, MISS - n))
                groups.append(tuple(mine))  # type: ignore[arg-type]
            disks = [(node.ssd_s, node.readers) for node in nodes]
            span = expected_max(polys, costs.pair_s, costs.base_s, top_k)
            bare = expected_max(polys, costs.pair_s, costs.fixed_s, top_k)
            read = expected_max_reading(groups, costs.pair_s, costs.base_s, disks, top_k)
            home, others = (self.polynomial(layer, np.flatnonzero(chosen)) for chosen in (row == MISS, row != MISS))
            stall = expected_stall(home, others, costs, top_k) + max(0.0, read - span)
            self._spans[key] = LayerTime(span, min(span, bare), stall, self.problem.sync_s)
        return self._spans[key]

    def _stall(self, missing: Ints, layer: int, row: Ints, slots: int | None) -> float:
        if not len(missing):
            return 0.0
        others = np.flatnonzero(row != MISS)
        drawn = expected_stall(self.polynomial(layer, missing), self.polynomial(layer, others), self.costs, self.top_k)
        return drawn * self.reuse_ratio(layer, row, slots)

    def reuse_ratio(self, layer: int, row: Ints, slots: int | None = None, rows: int = 1) -> float:
        """By what the misses of a step of `rows` rows differ from those of rows drawn anew; 1 when nothing is known.

        The cache is taken to be shared by the experts that nobody holds: those that miss, and of the local ones the
        least frequent, as many as there are slots.
        """
        if self.problem.reuse is None or not (row == MISS).any():
            return 1.0
        key = (*self._key(layer, row, slots), rows)
        if key not in self._reuse_ratios:
            if len(self._reuse_ratios) > 200_000:
                self._reuse_ratios.clear()
            frequencies = self.frequencies(layer)
            local = frequencies[row == 0]
            room = self.top_k if slots is None else slots
            missing = frequencies[row == MISS]
            loose = np.concatenate((np.sort(local)[:room], missing))
            misses = expected_misses(loose, room, frequencies, self.problem.reuse[layer], rows)
            self._reuse_ratios[key] = misses / max(float(np.sum(1 - (1 - missing) ** rows)), 1e-12)
        return self._reuse_ratios[key]


def _pair_prices(problem: Problem) -> Floats | None:
    """[nodes]: lambda P_n c_n + mu beta_0n (bytes there and back) of one pair; None when both weights are 0."""
    if not problem.energy_weight and not problem.traffic_weight:
        return None
    out = np.zeros(len(problem.nodes))
    for i, node in enumerate(problem.nodes):
        out[i] = problem.energy_weight * (node.power_w or 0.0) * node.compute_s
        if i and node.bandwidth_bytes_s:
            out[i] += problem.traffic_weight * 2 * problem.activation_bytes / node.bandwidth_bytes_s
    return out


def _weights(problem: Problem) -> tuple[list[Floats], list[int]]:
    """Routing weights a layer, and a number that is equal for layers with equal weights."""
    if problem.frequencies is None:
        flat = np.ones(problem.num_experts)
        return [flat] * len(problem.layers), [0] * len(problem.layers)
    known: dict[tuple[float, ...], tuple[int, Floats]] = {}
    fitted: dict[tuple[float, ...], Floats] = {}  # by frequencies in ascending order
    weights, kinds = [], []
    for row in problem.frequencies:
        if row not in known:
            order = np.argsort(row, kind="stable")
            ranked = tuple(row[i] for i in order)
            if ranked not in fitted:
                fitted[ranked] = weights_from_frequencies(ranked, problem.top_k)
            own = np.empty(len(row))
            own[order] = fitted[ranked]
            known[row] = (len(known), own)
        kinds.append(known[row][0])
        weights.append(known[row][1])
    return weights, kinds
