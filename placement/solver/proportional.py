"""A plain placement: whole layers at home first, the rest over the workers in proportion to their memory.

Needs no figures but memory, so it also stands in while nothing is measured. It knows no costs.
"""

from __future__ import annotations

from titan.common.errors import MemoryBudgetError
from titan.placement.plan import Plan
from titan.placement.problem import Problem


def reserve_bytes(problem: Problem) -> int:
    """Bytes node 0 needs at least: top-k slots in every MoE layer, so that it can execute any row alone."""
    return sum(b * min(problem.top_k, problem.num_experts) for b in problem.expert_bytes)


def require_home(problem: Problem) -> None:
    """Raises MemoryBudgetError when node 0 cannot hold the smallest table of every layer."""
    home, need = problem.nodes[0], reserve_bytes(problem)
    if home.memory_bytes < need:
        raise MemoryBudgetError(
            f"node {home.name} may use {home.memory_bytes} bytes for experts, {problem.top_k} slots in each of "
            f"{len(problem.layers)} layers need {need}",
            f"give it at least {need} bytes ({need / 2**30:.2f} GiB)",
        )


def proportional(problem: Problem) -> Plan:
    """Whole layers on node 0 in layer order, then workers by memory, then node 0's SSD.

    Raises:
        MemoryBudgetError: node 0 cannot hold top-k slots in every layer.
    """
    require_home(problem)
    experts, cache = problem.num_experts, min(problem.top_k, problem.num_experts)
    free = [n.memory_bytes for n in problem.nodes]
    free[0] -= reserve_bytes(problem)
    residency: list[tuple[tuple[int, ...], ...]] = []
    slots = [[0] * len(problem.layers) for _ in problem.nodes]
    for layer, size in enumerate(problem.expert_bytes):
        extra = min(experts - cache, free[0] // size)
        free[0] -= extra * size
        slots[0][layer] = cache + extra
        pinned = experts if extra == experts - cache else extra
        row: list[tuple[int, ...]] = [(0,)] * pinned
        for _ in range(pinned, experts):
            worker = _roomiest(free, problem, size)
            if worker is None:
                row.append(())
                continue
            free[worker] -= size
            slots[worker][layer] += 1
            row.append((worker,))
        residency.append(tuple(row))
    plan = Plan(
        fingerprint=problem.fingerprint,
        num_experts=experts,
        top_k=problem.top_k,
        layers=problem.layers,
        expert_bytes=problem.expert_bytes,
        nodes=problem.nodes,
        residency=tuple(residency),
        slots=tuple(tuple(row) for row in slots),
    )
    plan.validate()
    return plan


def _roomiest(free: list[int], problem: Problem, size: int) -> int | None:
    """The worker with the largest free share of its memory, so that all fill up at the same pace."""
    best, best_share = None, 0.0
    for worker in range(1, len(free)):
        share = free[worker] / problem.nodes[worker].memory_bytes if free[worker] >= size else 0.0
        if share > best_share:
            best, best_share = worker, share
    return best
