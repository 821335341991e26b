"""Workers grouped by what a call to them costs at least, nearest first. Knows figures and memory, no experts."""

from __future__ import annotations

from dataclasses import dataclass

from titan.placement.cost import Costs
from titan.placement.problem import Problem

MAX_CLASSES = 3


@dataclass(frozen=True, slots=True)
class WorkerClass:
    """Workers whose first expert costs about the same.

    Args:
        members: node indexes.
        theta_s: the least first_s + pair_s of a member: no step that uses the class is shorter.
        capacity_bytes: bytes of experts the members can hold together, whole experts each.
    """

    members: tuple[int, ...]
    theta_s: float
    capacity_bytes: int


def usable_bytes(problem: Problem, node: int) -> int:
    """Bytes of `node` that experts can fill: whole experts when all have one size."""
    sizes, have = set(problem.expert_bytes), problem.nodes[node].memory_bytes
    most = sum(problem.expert_bytes) * problem.num_experts
    return min(have - have % next(iter(sizes)) if len(sizes) == 1 else have, most)


def worker_classes(problem: Problem, costs: Costs, most: int = MAX_CLASSES) -> list[WorkerClass]:
    """At most `most` classes in ascending order of theta, cut at the widest gaps."""
    smallest = min(problem.expert_bytes)
    workers = [n for n in range(1, len(problem.nodes)) if problem.nodes[n].memory_bytes >= smallest]
    workers.sort(key=lambda n: (costs.base_s[n] + costs.pair_s[n], n))
    if not workers:
        return []
    theta = [costs.base_s[n] + costs.pair_s[n] for n in workers]
    gaps = sorted(range(1, len(workers)), key=lambda i: theta[i - 1] / theta[i] if theta[i] else 1.0)
    cuts = sorted(i for i in gaps[: most - 1] if theta[i] > theta[i - 1] * (1 + 1e-9))
    out = []
    for start, end in zip([0, *cuts], [*cuts, len(workers)], strict=True):
        members = tuple(workers[start:end])
        out.append(WorkerClass(members, theta[start], sum(usable_bytes(problem, n) for n in members)))
    return out
