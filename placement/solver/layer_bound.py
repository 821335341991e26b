"""A lower bound on the expected cost of one layer for every way to split it: a experts at workers only, s in no memory.

`core[i]` holds for any choice of experts and workers when at least `extra[i]` further worker slots hold replicas.
Three arguments, the largest counts:

* the cost grows with every selected expert that is moved from node 0 to workers, or from workers to no memory (a
  worker's expert may be read as well); so it is stochastically smallest when the least frequent experts are in no
  memory and the next at workers (exchange two experts, given that one of them is selected);
* with equal weights, the most loaded of N workers is stochastically smallest for a balanced partition (multivariate
  hypergeometric laws preserve Schur convexity);
* with unequal weights, P(no worker has more than k) is at most its value for N groups of equal total weight, each
  group's polynomial bounded by W^k / k!, and node 0's by its average (Maclaurin).

`chain` tells classes of workers apart, and workers from no memory: experts that only deeper levels hold run there or
are read.
It knows weights and figures, neither nodes' memory nor prices.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from titan.placement.routing import prefix_polynomials
from titan.placement.solver.outcome import Outcomes

Floats = NDArray[np.float64]
INTERVALS = 16  # of the weight at workers, in the bound for unequal weights; fewer are looser and faster


class LayerBound:
    """Tables of one kind of layer, indexed [a, s]; inf where a + s > E - K.

    Args:
        weights: routing weights of the layer's experts, any order.
        deep: per level but the first, [r, k] least seconds when r selected experts are not at home and k of them at
            this level or deeper; the levels are the classes of workers, nearest first, then no memory.
        replica_steps: how finely replicas are told apart: (least extra slots, extra slots assumed).
    """

    def __init__(
        self,
        weights: Floats,
        outcomes: Outcomes,
        top_k: int,
        workers: int,
        deep: list[Floats],
        replica_steps: list[tuple[int, int]],
        sync_s: float,
        intervals: int = INTERVALS,
    ) -> None:
        self.weights = np.sort(weights)[::-1]
        self.out, self.top_k, self.workers, self.intervals = outcomes, top_k, workers, intervals
        self.experts = len(weights)
        self.whole_s = float(outcomes.least[0, 0])
        head = prefix_polynomials(self.weights, top_k)
        tail = prefix_polynomials(self.weights[::-1], top_k)
        self.total = head[-1, top_k]
        # [a, r]: chance that r of the a least frequent experts are selected
        self.tail_counts = tail * head[::-1][:, ::-1] / self.total
        flat = bool(np.ptp(self.weights) == 0)
        self.extra = [low for low, _ in replica_steps]
        between = self._between()
        joint = None if flat else self._sorted_split(between, tail, head)
        self.core = [
            (self._core_flat(assumed) if joint is None else self._core_skewed(assumed, joint)) + sync_s
            for _, assumed in replica_steps
        ]
        self.chain_base = self.tail_counts @ outcomes.least[:, 0] + sync_s
        self.chain = self._chain(deep, between, tail, head)

    def _between(self) -> Floats:
        """[x, y, k]: polynomial of the experts ranked E - x .. E - y by frequency."""
        experts = self.experts
        out = np.zeros((experts + 1, experts + 1, self.top_k + 1))
        out[np.arange(experts + 1), np.arange(experts + 1), 0] = 1.0
        for size in range(1, experts + 1):
            out[size, :size] = out[size - 1, :size]
            out[size, :size, 1:] += self.weights[experts - size] * out[size - 1, :size, :-1]
        return out

    def _sorted_split(self, between: Floats, tail: Floats, head: Floats) -> Floats:
        """[a, s]: E[least(r, j)] when the s least frequent experts are in no memory and the next a at workers."""
        top_k, experts = self.top_k, self.experts
        table = np.zeros((experts + 1, experts + 1))  # first [a + s, s]
        for r in range(top_k + 1):
            for j in range(top_k + 1 - r):
                rest = head[::-1, top_k - r - j] * (self.out.least[r, j] / self.total)
                table += between[:, :, r] * tail[None, :, j] * rest[:, None]
        a, s = np.arange(experts + 1)[:, None], np.arange(experts + 1)[None, :]
        return table[np.minimum(a + s, experts), s]

    def _mask(self, table: Floats) -> Floats:
        a, s = np.arange(self.experts + 1)[:, None], np.arange(self.experts + 1)[None, :]
        table[(a + s > self.experts - self.top_k) | (a + s == 0)] = np.inf
        if not self.workers:
            table[1:] = np.inf
        return table

    def _core_flat(self, extra: int) -> Floats:
        """Exact over counts: (r, j) is hypergeometric, the most loaded worker that of a balanced partition."""
        top_k, experts, out = self.top_k, self.experts, self.out
        comb = np.array([[math.comb(n, k) for k in range(top_k + 1)] for n in range(experts + 1)], dtype=np.float64)
        clean = self._balanced(comb, extra)
        sizes = np.arange(experts + 1)
        away = np.minimum(sizes[:, None] + sizes[None, :], experts)
        home = comb[experts - away]
        table = np.zeros((experts + 1, experts + 1))
        for r in range(top_k + 1):
            for j in range(top_k + 1 - r):
                cost = out.least[r, j] if j else self._movable(comb, clean[:, r], away, top_k - r, extra)
                table += comb[:, r][:, None] * comb[:, j][None, :] * home[:, :, top_k - r - j] * cost
        return self._mask(table / comb[experts, top_k])

    def _movable(self, comb: Floats, clean: Floats, away: NDArray[np.int64], local: int, extra: int) -> Floats:
        """[a, s]: mean of `clean` [a, f] over how many of the `local` selected experts of node 0 have a replica."""
        if extra == 0:
            return np.broadcast_to(clean[:, :1], away.shape)
        size = self.experts - away
        movable, table = np.minimum(extra, size), np.zeros(away.shape)
        for f in range(local + 1):
            share = comb[movable, f] * comb[size - movable, local - f]
            share = np.divide(share, comb[size, local], out=np.zeros_like(share), where=comb[size, local] > 0)
            table += share * clean[:, f][:, None]
        return table

    def _balanced(self, comb: Floats, extra: int) -> Floats:
        """[a, r, f]: expected cost with r of a worker experts selected and none missing, when f of the selected experts
        of node 0 have a replica; at most `extra` experts have one."""
        top_k, out = self.top_k, self.out
        clean = np.zeros((self.experts + 1, top_k + 1, top_k + 1))
        if not self.workers:
            return clean + out.least[:, 0][None, :, None]
        loads = _load_distribution(comb, self.workers, top_k)  # [q, r, kappa]
        kappa = np.arange(top_k + 1)
        busy = np.where(kappa > 0, out.first_s + out.pair_s * kappa, 0.0)
        sizes = np.arange(self.experts + 1)
        singles = np.maximum(sizes - extra, 0)
        for r in range(top_k + 1):
            times = np.maximum(out.split[r][None, :], busy[:, None] if r else 0.0)
            times = np.minimum(np.broadcast_to(times, (top_k + 1, top_k + 1)), out.read[r])  # [kappa, f]
            for fixed in range(r + 1):
                share = comb[singles, fixed] * comb[sizes - singles, r - fixed]
                share = np.divide(share, comb[:, r], out=np.zeros_like(share), where=comb[:, r] > 0)
                clean[:, r] += share[:, None] * (loads[singles, fixed] @ times)
        return clean

    def _core_skewed(self, extra: int, joint: Floats) -> Floats:
        top_k, out = self.top_k, self.out
        table = joint
        finite_read = float(np.min(out.read[1:], initial=np.inf))
        caps = {finite_read, min(finite_read, max(out.home[top_k], 1.2 * out.remote[top_k]))}
        finite = sorted(c for c in caps if np.isfinite(c))
        for cap, spread in zip(finite, self._spread(extra, finite), strict=True):
            later = np.maximum(out.home[1] + out.stall - cap, 0.0)
            later[0] = 0.0
            table = np.maximum(table, spread[:, None] + (self.tail_counts @ later)[None, :])
        return self._mask(table.copy())

    def _spread(self, extra: int, caps: list[float]) -> list[Floats]:
        """Per cap [a]: bound on E[min(cost, cap)], a experts at workers: the integral of 1 - P(cost <= t) to cap."""
        if not caps:
            return []
        top_k, out, experts = self.top_k, self.out, self.experts
        kappa_times = out.first_s + out.pair_s * np.arange(1, top_k + 1)
        ends = np.unique(np.clip(np.concatenate([[0.0], out.split.ravel(), kappa_times, caps]), 0.0, caps[-1]))
        starts = ends[:-1]
        widths = [np.where(starts < cap, np.diff(ends), 0.0) for cap in caps]
        kappa = (kappa_times[None, :] <= starts[:, None] * (1 + 1e-12)).sum(axis=1)
        allowed = (out.split[None] <= starts[:, None, None] * (1 + 1e-12)).astype(np.float64)  # [t, r, f]
        heavy = np.concatenate([[0.0], np.cumsum(self.weights)])
        light = np.concatenate([[0.0], np.cumsum(self.weights[::-1])])
        whole, sizes, powers = heavy[-1], np.arange(experts + 1), np.arange(top_k + 1)
        factorial = np.array([math.factorial(k) for k in powers], dtype=np.float64)
        comb = np.array([[math.comb(n, k) for k in powers] for n in sizes], dtype=np.float64)
        best = [np.full(experts + 1, np.inf) for _ in caps]
        fits = np.zeros(0)
        for i in range(self.intervals):
            low = light * (heavy / np.maximum(light, 1e-300)) ** ((i / self.intervals) ** 2)
            high = light * (heavy / np.maximum(light, 1e-300)) ** (((i + 1) / self.intervals) ** 2)
            flexible = np.minimum(1.0, heavy[min(extra, experts)] / np.maximum(low, 1e-300))
            if extra or not i:
                fits = _packed(self.workers, top_k, flexible)[:, kappa]  # [a, t, r]
            at_home = whole - np.minimum(low, whole)
            movable = np.minimum(heavy[min(extra, experts)], at_home)
            average = (at_home - movable) / np.maximum(experts - sizes, 1)
            home = comb[experts - sizes] * average[:, None] ** powers[None, :]
            remote = high[:, None] ** powers[None, :] / factorial[None, :] / self.total  # [a, r]
            below = np.zeros((experts + 1, len(starts)))
            for f in powers if extra else powers[:1]:
                joint = remote[:, : top_k + 1 - f] * home[:, : top_k + 1 - f][:, ::-1]
                joint = joint * (movable[:, None] ** f / factorial[f])
                below += np.einsum("ar,atr,tr->at", joint, fits[:, :, : top_k + 1 - f], allowed[:, : top_k + 1 - f, f])
            above = np.maximum(0.0, 1.0 - below)
            best = [np.minimum(b, above @ width) for b, width in zip(best, widths, strict=True)]
        return best

    def _chain(self, deep: list[Floats], between: Floats, tail: Floats, head: Floats) -> list[Floats]:
        """Per level i >= 1, [u, d]: what d experts at levels >= i add to `chain_base[u]`, u not being at home.

        With k of the d and r of the u selected, the levels before bring the cost to deep_{i-1}(r, r) at most; only what
        deep_i(r, k) has above that is counted, so the levels' parts add up.
        """
        top_k, experts = self.top_k, self.experts
        tables, reached = [], self.out.least[:, 0].copy()
        for times in deep:
            table = np.zeros((experts + 1, experts + 1))
            for k in range(1, top_k + 1):
                for r in range(k, top_k + 1):
                    gain = times[r, k] - reached[r]
                    if gain > 0:
                        rest = head[::-1, top_k - r] * (gain / self.total)
                        table += between[:, :, r - k] * tail[None, :, k] * rest[:, None]
            tables.append(np.where(np.tri(experts + 1, dtype=bool), table, np.inf))
            reached = np.maximum(reached, np.diagonal(times))
        return tables


def _load_distribution(comb: Floats, workers: int, top_k: int) -> Floats:
    """[q, r, kappa]: P(most loaded of the workers has kappa | r selected of q balanced over them)."""
    count = len(comb)
    sizes, powers = np.arange(count), np.arange(top_k + 1)
    keep = powers[None, :] <= powers[:, None]  # [kappa, k]
    total = np.zeros((count, top_k + 1, top_k + 1))
    total[:, :, 0] = 1.0
    for i in range(workers):
        members = sizes // workers + (i < sizes % workers)
        term = comb[members][:, None, :] * keep[None]
        product = total * term[:, :, :1]
        for k in range(1, top_k + 1):
            product[:, :, k:] += total[:, :, : top_k + 1 - k] * term[:, :, k : k + 1]
        total = product
    below = np.swapaxes(total, 1, 2)  # [q, r, kappa]
    below = np.divide(below, comb[:, :, None], out=np.ones_like(below), where=comb[:, :, None] > 0)
    return np.diff(below, axis=2, prepend=0.0)


def _packed(workers: int, top_k: int, flexible: Floats) -> Floats:
    """[a, kappa, r]: P(no worker gets more than kappa of r balls thrown at random); each ball is free with chance
    `flexible[a]` and then fits anywhere while r <= workers * kappa."""
    powers = np.arange(top_k + 1)
    factorial = np.array([math.factorial(k) for k in powers], dtype=np.float64)
    fits = np.zeros((top_k + 1, top_k + 1))
    for kappa in powers:
        one = np.where(powers <= kappa, 1.0 / factorial, 0.0)
        total = np.eye(1, top_k + 1)[0]
        for _ in range(workers):
            total = np.convolve(total, one)[: top_k + 1]
        fits[kappa] = total * factorial / float(max(1, workers)) ** powers
    out = np.zeros((len(flexible), top_k + 1, top_k + 1))
    for r in powers:
        for fixed in range(r + 1):
            chance = math.comb(r, fixed) * (1 - flexible) ** fixed * flexible ** (r - fixed)
            out[:, :, r] += chance[:, None] * fits[None, :, fixed]
        out[:, powers * workers < r, r] = 0.0
    return out
