"""From counts to experts: which experts of a layer stay local, which go to which worker, which to the SSD.

The most frequent stay local, the next go to the nearest class of workers, the least frequent to the SSD; inside a class
they are dealt longest first so that the workers' loads are even. It knows counts and weights, not how they were chosen.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from titan.placement.evaluate import MISS, Evaluator, Floats, Ints
from titan.placement.solver.classes import WorkerClass, usable_bytes


class Shares:
    """How a class's experts divide over its members: in proportion to speed, as far as their memory goes."""

    def __init__(self, evaluator: Evaluator, classes: list[WorkerClass], demand_bytes: list[float]) -> None:
        problem = evaluator.problem
        self.parts: list[Floats] = []
        for group, demand in zip(classes, demand_bytes, strict=True):
            room = np.array([usable_bytes(problem, n) for n in group.members], dtype=np.float64)
            speed = np.array([1 / max(evaluator.costs.pair_s[n], 1e-12) for n in group.members])
            low, high = 0.0, float(np.max(room / speed))
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if np.minimum(room, speed * middle).sum() < demand else (low, middle)
            part = np.minimum(room, speed * high)
            self.parts.append(part / part.sum() if part.sum() > 0 else np.full(len(room), 1 / len(room)))


def whole_counts(total: int, parts: Floats, carry: Floats, room: Ints) -> Ints:
    """Divide `total` experts by `parts`; `carry` remembers what rounding owed earlier layers, `room` is the most each
    may take. The sum is smaller than `total` only when there is no room."""
    carry += total * parts
    counts = np.clip(np.floor(carry + 1e-9).astype(np.int64), 0, room)
    while counts.sum() > total:
        counts[int(np.argmin(np.where(counts > 0, carry - counts, np.inf)))] -= 1
    while counts.sum() < total:
        owed = np.where(counts < room, carry - counts, -np.inf)
        at = int(np.argmax(owed))
        if not np.isfinite(owed[at]):
            break
        counts[at] += 1
    carry -= counts
    return counts


def deal(weights: Floats, order: Ints, counts: Ints, pair_s: Floats) -> list[Ints]:
    """Split the experts `order` (descending weight) into groups of `counts`, loads (c_n times weight) evened out."""
    groups: list[list[int]] = [[] for _ in counts]
    if not len(order) or np.ptp(weights[order]) == 0:
        edges = np.concatenate([[0], np.cumsum(counts)])
        return [order[a:b] for a, b in pairwise(edges)]
    load, left = np.zeros(len(counts)), counts.copy()
    target = counts * pair_s
    target = target / target.sum()
    for expert in order[: int(counts.sum())]:
        score = np.where(left > 0, (load + weights[expert] * pair_s) / np.maximum(target, 1e-300), np.inf)
        at = int(np.argmin(score))
        groups[at].append(int(expert))
        load[at] += weights[expert] * pair_s[at]
        left[at] -= 1
    return [np.array(g, dtype=np.int64) for g in groups]


class Builder:
    """Fills an arrangement layer by layer, keeping count of every node's free bytes."""

    def __init__(self, evaluator: Evaluator, classes: list[WorkerClass], shares: Shares) -> None:
        problem = evaluator.problem
        self.evaluator, self.classes, self.shares = evaluator, classes, shares
        self.place = np.full((len(problem.layers), problem.num_experts), MISS, dtype=np.int64)
        self.free = np.array([usable_bytes(problem, n) for n in range(len(problem.nodes))], dtype=np.int64)
        self.carry = [np.zeros(len(c.members)) for c in classes]

    def layer(self, layer: int, local: int, workers: tuple[int, ...], skipped: int) -> None:
        """Arrange one layer, see `arrange`."""
        size = self.evaluator.problem.expert_bytes[layer]
        self.place[layer], used = arrange(
            self.evaluator, self.classes, self.shares, layer, local, workers, skipped, self.carry, self.free // size
        )
        self.free -= used * size


def arrange(
    evaluator: Evaluator,
    classes: list[WorkerClass],
    shares: Shares,
    layer: int,
    local: int,
    workers: tuple[int, ...],
    skipped: int,
    carry: list[Floats],
    room: Ints,
) -> tuple[Ints, Ints]:
    """One layer's row [E] and the slots it uses on each node.

    Args:
        local, workers: experts at home, and at every class of workers; the rest is left to the SSD.
        skipped: so many of the most frequent experts go to workers before node 0 gets its share: with fast links
            node 0 would otherwise be the one that finishes last.
        room: slots each node can still give.
    """
    weights, problem = evaluator.weights[layer], evaluator.problem
    order = np.argsort(-weights, kind="stable")
    row, used = np.full(problem.num_experts, MISS, dtype=np.int64), np.zeros(len(problem.nodes), dtype=np.int64)
    order = np.concatenate([order[skipped : skipped + local], order[:skipped], order[skipped + local :]])
    row[order[:local]] = 0
    used[0] = max(local, min(problem.top_k, problem.num_experts))
    at = local
    for group, part, owed, count in zip(classes, shares.parts, carry, workers, strict=True):
        members = np.array(group.members)
        counts = whole_counts(count, part, owed, room[members])
        pair = np.array([evaluator.costs.pair_s[n] for n in group.members])
        taken = int(counts.sum())
        for node, experts in zip(group.members, deal(weights, order[at : at + taken], counts, pair), strict=True):
            row[experts] = node
            used[node] += len(experts)
        at += taken
    return row, used
