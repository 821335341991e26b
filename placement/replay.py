"""A whole plan under a trace: every layer of every step dispatched as the coordinator would, caches included.

It knows plans, traces and figures; nothing is executed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from titan.common.errors import PlanError
from titan.placement.cost import Costs
from titan.placement.dispatch import choose
from titan.placement.dispatch_rows import choose_rows
from titan.placement.plan import Plan
from titan.placement.problem import Problem
from titan.placement.simulate import Table
from titan.placement.trace import Trace


@dataclass(frozen=True, slots=True)
class PlanRun:
    """What a replay saw: mean step and its stall in seconds, (row, expert) pairs by where they ran, cache hit rate."""

    steps: int
    step_s: float
    stall_s: float
    local: int
    remote: int
    ssd: int
    cache_hit_rate: float


def replay_plan(
    plan: Plan,
    problem: Problem,
    trace: Trace,
    *,
    policy: str = "lru",
    max_steps: int = 10_000,
    evict_s: float | None = None,
) -> PlanRun:
    """Replay the first steps of a trace through a plan, caches filled with experts that no node pins.

    `evict_s` is dispatch's charge for reading an expert that a worker holds, one SSD read by default: without it
    dispatch saves a round trip now and pays for the expert it evicted later.

    Raises:
        PlanError: the trace is of another model or has other layers.
    """
    check_same_model(plan, trace)
    costs = Costs.of(plan.nodes, problem.activation_bytes)
    whole = [plan.is_whole(i) for i in range(len(plan.layers))]
    tables = [Table(max(plan.cache_slots(i), plan.top_k), policy) for i in range(len(plan.layers))]
    evict = costs.ssd_s if evict_s is None else evict_s
    for table, row in zip(tables, plan.residency, strict=True):
        table.step([e for e, holders in enumerate(row) if not holders][: table.capacity])
    fixed = sum(problem.attention_s) + problem.other_s + problem.sync_s * whole.count(False)
    edges = [*np.flatnonzero(np.diff(trace.step, prepend=-1)).tolist(), len(trace.step)]
    steps = min(len(edges) - 1, max_steps)
    total = stalls = 0.0
    counts = {"local": 0, "remote": 0, "ssd": 0}
    asked = missed = 0
    for t in range(steps):
        rows = trace.ids[edges[t] : edges[t + 1]]
        total += fixed
        for layer, holders in enumerate(plan.residency):
            experts, pairs = np.unique(rows[:, layer], return_counts=True)
            chosen, counted = experts.tolist(), pairs.tolist()
            table = tables[layer]
            if len(rows) == 1:
                choice = choose(chosen, holders, costs, local_resident=table, evict_s=evict)
            else:
                choice = choose_rows(chosen, counted, holders, costs, local_resident=table, evict_s=evict)
            total += choice.latency_s
            stalls += -(-len(choice.reads) // costs.readers) * costs.ssd_s
            reads = set(choice.reads)
            cached = [e for e, n in zip(chosen, choice.nodes, strict=True) if n == 0 and 0 not in holders[e]]
            asked += len(cached)
            missed += len(reads)
            for start in range(0, len(cached), table.capacity):
                table.step(cached[start : start + table.capacity])
            for expert, node, count in zip(chosen, choice.nodes, counted, strict=True):
                counts["ssd" if expert in reads else "remote" if node else "local"] += count
    steps = max(1, steps)
    return PlanRun(steps, total / steps, stalls / steps, **counts, cache_hit_rate=1 - missed / asked if asked else 1.0)


def check_same_model(plan: Plan, trace: Trace) -> None:
    """Raises PlanError when a trace is not of the plan's model."""
    mine = (plan.fingerprint, plan.layers, plan.num_experts, plan.top_k)
    header = trace.header
    if mine != (header.fingerprint, header.layers, header.num_experts, header.top_k):
        raise PlanError(
            f"the trace is of another model than the plan ({header.num_experts} experts, top-{header.top_k}, "
            f"{len(header.layers)} MoE layers, {header.fingerprint[:12]}…)",
            "record a trace with this model",
        )
