"""Local search: move blocks of experts between node 0, workers and the SSD while the expected step shrinks.

A move that lacks memory at its target is paired with one the other way in some layer. Deterministic for a seed as
long as the number of tries ends it, not the clock. It knows arrangements and exact costs, no bounds.
"""

from __future__ import annotations

import time

import numpy as np

from titan.placement.arrangement import memory_used
from titan.placement.evaluate import MISS, Evaluator, Ints

ENOUGH = 2e-4  # relative gain of a round below which the search ends
BLOCKS = (1, 1, 2, 4, 8, 16, 32)


def polish(evaluator: Evaluator, place: Ints, *, seed: int, deadline: float, tries: int) -> Ints:
    """A no worse arrangement. Stops at `deadline` (time.monotonic()) or when `tries` tries gained next to nothing."""
    search = _Search(evaluator, place.copy(), np.random.default_rng(seed))
    before = sum(search.cost) + evaluator.fixed_s
    while True:
        for _ in range(tries):
            search.attempt()
            if time.monotonic() > deadline:
                return search.place
        after = sum(search.cost) + evaluator.fixed_s
        if after >= before * (1 - ENOUGH):
            return search.place
        before = after


class _Search:
    def __init__(self, evaluator: Evaluator, place: Ints, rng: np.random.Generator) -> None:
        self.evaluator, self.place, self.rng = evaluator, place, rng
        problem = evaluator.problem
        self.size = problem.expert_bytes
        self.keep = min(problem.top_k, problem.num_experts)
        self.free = [n.memory_bytes for n in problem.nodes]
        for node, used in enumerate(memory_used(problem, place)):
            self.free[node] -= int(used)
        self.cost = [evaluator.layer(i, row) for i, row in enumerate(place)]
        usable = [n for n in range(1, len(problem.nodes)) if problem.nodes[n].memory_bytes >= min(self.size)]
        self.targets = [MISS, 0, *usable]

    def attempt(self) -> bool:
        """Try one random move; True when it was taken."""
        rng = self.rng
        layer = int(rng.integers(len(self.place)))
        source = int(self.place[layer, rng.integers(self.place.shape[1])])
        target = self.targets[int(rng.integers(len(self.targets)))]
        if source == target:
            return False
        block = BLOCKS[int(rng.integers(len(BLOCKS)))]
        if rng.random() < 0.1:
            block = self.place.shape[1]
        row = self._moved(self.place[layer], layer, source, target, block)
        if row is None:
            return False
        rows = {layer: row}
        if not self._fits(rows):
            other = int(rng.integers(len(self.place)))
            moved = int(np.count_nonzero(row != self.place[layer]))
            base = row if other == layer else self.place[other]
            back = self._moved(base, other, target, source, max(1, round(moved * self.size[layer] / self.size[other])))
            if back is None:
                return False
            rows[other] = back
            if not self._fits(rows):
                return False
        costs = {i: self.evaluator.layer(i, r) for i, r in rows.items()}
        if sum(costs.values()) >= sum(self.cost[i] for i in rows) - 1e-15:
            return False
        change = self._change(rows)
        for i, r in rows.items():
            self.place[i], self.cost[i] = r, costs[i]
        self.free = [f - c for f, c in zip(self.free, change, strict=True)]
        return True

    def _moved(self, row: Ints, layer: int, source: int, target: int, block: int) -> Ints | None:
        there = np.flatnonzero(row == source)
        if source == 0:
            block = min(block, len(there) - self.keep)
        block = min(block, len(there))
        if block <= 0:
            return None
        weights = self.evaluator.weights[layer][there]
        pick = self.rng.random()
        if pick < 0.4:
            chosen = there[np.argsort(weights, kind="stable")[:block]]
        elif pick < 0.8:
            chosen = there[np.argsort(-weights, kind="stable")[:block]]
        else:
            chosen = self.rng.choice(there, block, replace=False)
        out = row.copy()
        out[chosen] = target
        return out

    def _change(self, rows: dict[int, Ints]) -> list[int]:
        change = [0] * len(self.free)
        for i, row in rows.items():
            counts = np.bincount(row + 1, minlength=len(self.free) + 1) - np.bincount(
                self.place[i] + 1, minlength=len(self.free) + 1
            )
            for node, count in enumerate(counts[1:].tolist()):
                change[node] += count * self.size[i]
        return change

    def _fits(self, rows: dict[int, Ints]) -> bool:
        return all(c <= max(f, 0) or c <= 0 for f, c in zip(self.free, self._change(rows), strict=True))
