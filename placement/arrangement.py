"""Arrangements and plans: turning one into the other, and what an arrangement uses of each node's memory.

See `evaluate` for what an arrangement is. Local experts of a layer that is not wholly on node 0 take the table's
slots: the most frequent are pinned, the last top-k stay unpinned and live in the cache slots that every layer must have
anyway (to run any row alone when the workers are lost). So do a worker's experts in a layer in which it reads from its
disk. It knows no costs.
"""

from __future__ import annotations

import numpy as np

from titan.placement.evaluate import MISS, Floats, Ints
from titan.placement.plan import Plan
from titan.placement.problem import Problem


def memory_used(problem: Problem, place: Ints) -> Ints:
    """Bytes of expert slots an arrangement needs on every node. [nodes]"""
    used = np.zeros(len(problem.nodes), dtype=np.int64)
    for row, size in zip(place, problem.expert_bytes, strict=True):
        counts = np.bincount(row[row >= 0], minlength=len(problem.nodes))
        counts[0] = max(counts[0], min(problem.top_k, problem.num_experts))
        for n in np.unique(MISS - row[row < MISS]).tolist():
            counts[n] = max(counts[n], min(problem.top_k, problem.num_experts))
        used += counts * size
    return used


def to_plan(
    problem: Problem, place: Ints, weights: list[Floats], replicas: dict[tuple[int, int], list[int]] | None = None
) -> Plan:
    """The plan of an arrangement; `replicas` maps (layer position, expert) to further workers that hold it.

    Node 0's spare bytes become further cache slots where experts are read from the SSD.

    Raises:
        PlanViolation: the arrangement does not fit the nodes.
    """
    experts, top_k, more = problem.num_experts, min(problem.top_k, problem.num_experts), replicas or {}
    reads = [[0] * experts for _ in place]
    residency, slots = [], np.zeros((len(problem.nodes), len(problem.layers)), dtype=np.int64)
    for layer, row in enumerate(place):
        local = np.flatnonzero(row == 0)
        whole = len(local) == experts
        ranked = local[np.argsort(-weights[layer][local], kind="stable")]
        pinned = set((ranked if whole else ranked[: max(0, len(ranked) - top_k)]).tolist())
        slots[0, layer] = experts if whole else max(len(local), top_k)
        loose = set()
        for worker in np.unique(MISS - row[row < MISS]).tolist():
            mine = np.flatnonzero(row == worker)
            unpinned = mine[np.argsort(-weights[layer][mine], kind="stable")][max(0, len(mine) - top_k) :].tolist()
            loose.update(unpinned)
            slots[worker, layer] = max(len(mine), top_k) - (
                len(mine) - len(unpinned)
            )  # the pinned ones are added below
            for expert in (*unpinned, *np.flatnonzero(row == MISS - worker).tolist()):
                reads[layer][expert] = worker
        holders = []
        for expert, node in enumerate(row.tolist()):
            at = [0] if expert in pinned else [node] if node > 0 and expert not in loose else []
            holders.append(tuple(sorted({*at, *more.get((layer, expert), ())})))
            for n in holders[-1]:
                slots[n, layer] += n > 0
        residency.append(tuple(holders))
    _spend_spare(problem, place, slots)
    plan = Plan(
        fingerprint=problem.fingerprint,
        num_experts=experts,
        top_k=problem.top_k,
        layers=problem.layers,
        expert_bytes=problem.expert_bytes,
        nodes=problem.nodes,
        residency=tuple(residency),
        slots=tuple(tuple(row) for row in slots.tolist()),
        reads=tuple(map(tuple, reads)) if (place < MISS).any() else (),
    )
    plan.validate()
    return plan


def _spend_spare(problem: Problem, place: Ints, slots: Ints) -> None:
    spare = problem.nodes[0].memory_bytes - int(np.dot(slots[0], problem.expert_bytes))
    misses = (place == MISS).sum(axis=1)
    while True:
        want = [i for i in np.argsort(-misses, kind="stable") if misses[i] > 0 and problem.expert_bytes[i] <= spare]
        if not want:
            return
        for layer in want:
            if problem.expert_bytes[layer] <= spare:
                slots[0, layer] += 1
                misses[layer] -= 1
                spare -= problem.expert_bytes[layer]


def from_plan(plan: Plan, weights: list[Floats]) -> Ints:
    """The arrangement a plan amounts to, each expert at its first holder; unpinned experts that the cache slots can
    keep count as local, the most frequent first."""
    place = np.full((len(plan.layers), plan.num_experts), MISS, dtype=np.int64)
    for layer, row in enumerate(plan.residency):
        for expert, holders in enumerate(row):
            if holders:
                place[layer, expert] = holders[0]
        for node in range(1, len(plan.nodes)) if plan.reads else ():
            mine = np.array(plan.served_by(node)[layer], dtype=np.int64)
            ranked = mine[np.argsort(-weights[layer][mine], kind="stable")]
            place[layer, ranked] = MISS - node
            place[layer, ranked[: plan.cache_slots(layer, node)]] = node
        free = np.flatnonzero(place[layer] == MISS)
        ranked = free[np.argsort(-weights[layer][free], kind="stable")]
        place[layer, ranked[: plan.cache_slots(layer)]] = 0
    return place
