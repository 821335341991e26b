"""From a cluster's figures to a plan: the problem the solver is given, and what is said about its answer.

Pure but for the log. Knows neither sessions nor how figures are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.config.hosts import HostsConfig
from titan.common.log import get_logger
from titan.common.registry import ModelShape
from titan.common.slots.buffers import slot_bytes
from titan.common.units import format_bytes, format_seconds
from titan.placement import Node, Plan, Problem
from titan.placement.arrangement import from_plan
from titan.placement.evaluate import Evaluator
from titan.placement.figures import Figures
from titan.placement.loose import deal
from titan.placement.reuse import Reuse

log = get_logger("coordinator.plan")


def make_problem(
    shape: ModelShape,
    hosts: HostsConfig,
    dtype: str,
    home_bytes: int,
    worker_bytes: Mapping[str, int],
    addresses: Mapping[str, str],
    figures: Figures | None,
    frequencies: tuple[tuple[float, ...], ...] | None = None,
    caches: Mapping[str, int] | None = None,
    *,
    cached: bool = False,
    reuse: Reuse | None = None,
    disks: Mapping[str, float | None] | None = None,
) -> Problem:
    """The placement problem of this cluster.

    Args:
        home_bytes: M_0.
        worker_bytes: M_n by worker; absent workers hold nothing.
        addresses: host:port that each worker was reached at.
        figures: measured; None leaves memory as the only figure. A worker without figures is left out.
        frequencies: how often a row selects each expert, per MoE layer, if a trace says so.
        caches: cache slots a layer by worker: their memory is not for experts that stay (see `with_caches`).
        cached: what is read lies in the page cache after its first reading: lambda is that of the cache.
        reuse: from row to row, if a trace or serving told.
        disks: workers that can read from their own disks; mean seconds of a read while serving, None if not told. One
            with `caches` reads what those slots are dealt, and nothing that is planned.
    """
    expert_bytes = tuple(slot_bytes(spec, dtype) for spec in shape.layers)
    home = figures.home if figures is not None else None
    nodes = [
        Node(
            hosts.coordinator.name,
            home_bytes,
            compute_s=home.compute_s if home else 0.0,
            compute_fixed_s=home.compute_fixed_s if home else 0.0,
            ssd_s=0.0 if home is None else home.page_cache_s if cached else home.ssd_s,
            page_cache_s=home.page_cache_s if home else None,
            readers=home.readers if home else 1,
            power_w=home.power_w if home else None,
        )
    ]
    row_bytes = shape.hidden_size * COMPUTE_DTYPES[dtype][0].itemsize
    for worker in hosts.workers:
        address = addresses.get(worker.name, "")
        measured, why = None, None
        if figures is not None:
            measured = figures.at(worker.name, address) or figures.workers.get(worker.name)
            why = figures.why_address(worker.name, address, max(1, shape.top_k // 2), row_bytes)
        usable = worker_bytes.get(worker.name, 0) if figures is None or measured is not None else 0
        ssd_s, readers = 0.0, 1
        if measured is not None and worker.name in (disks or {}) and worker.name not in (caches or {}):
            ssd_s, readers = max(measured.ssd_s or 0.0, (disks or {})[worker.name] or 0.0), measured.readers
        usable = max(0, usable - (caches or {}).get(worker.name, 0) * sum(expert_bytes))
        nodes.append(
            Node(
                worker.name,
                usable,
                compute_s=measured.compute_s if measured else 0.0,
                round_trip_s=measured.round_trip_s if measured else 0.0,
                bandwidth_bytes_s=measured.bandwidth_bytes_s if measured else None,
                ssd_s=ssd_s,
                readers=readers,
                address=address or None,
                address_why=why,
                power_w=measured.power_w if measured else None,
            )
        )
    return Problem(
        fingerprint=shape.fingerprint,
        layers=tuple(spec.index for spec in shape.layers),
        expert_bytes=expert_bytes,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        attention_s=(home.attention_s if home else 0.0,) * len(shape.layers),
        nodes=tuple(nodes),
        activation_bytes=row_bytes,
        sync_s=home.sync_s + home.choice_s if home else 0.0,
        frequencies=frequencies,
        reuse=reuse,
        reduced=hosts.precision == "reduced",
    )


def with_caches(plan: Plan, caches: Mapping[str, int], worker_bytes: Mapping[str, int]) -> Plan:
    """The plan with cache slots on workers, in the memory that `make_problem` left for them.

    Only layers in which node 0 is to read more experts than it has cache slots get them; those experts are then dealt
    out to node 0 and these workers. What that saves is not in the plan's prediction.
    """
    if not caches:
        return plan
    loose = plan.served_by(0)
    short = [len(experts) > plan.cache_slots(i) for i, experts in enumerate(loose)]
    slots, nodes = [], []
    for node, row in zip(plan.nodes, plan.slots, strict=True):
        more = caches.get(node.name, 0)
        slots.append(tuple(min(plan.num_experts, s + more * here) for s, here in zip(row, short, strict=True)))
        nodes.append(replace(node, memory_bytes=worker_bytes[node.name]) if more else node)
    reads = [list(row) for row in plan.reads]
    plan = replace(plan, nodes=tuple(nodes), slots=tuple(slots))
    for layer, row in enumerate(reads):
        shares = [plan.cache_slots(layer, n) * (n == 0 or node.name in caches) for n, node in enumerate(plan.nodes)]
        for n, experts in enumerate(deal(loose[layer], shares) if short[layer] else ()):
            for expert in experts:
                row[expert] = n
    plan = replace(plan, reads=tuple(map(tuple, reads)))
    plan.validate()
    return plan


def held_bytes(plan: Plan, node: int) -> int:
    """Bytes of the experts that a node is to hold."""
    return sum(len(experts) * size for experts, size in zip(plan.held_by(node), plan.expert_bytes, strict=True))


def expected_step_s(problem: Problem, plan: Plan) -> float:
    """Expected seconds of a step of `plan` under the figures of `problem` (equation 5)."""
    evaluator = Evaluator(problem)
    return evaluator.step(from_plan(plan, evaluator.weights), _cache_slots(plan))


def expected_reads(problem: Problem, plan: Plan) -> float:
    """Expected experts that a step of `plan` reads from this machine's disk."""
    evaluator = Evaluator(problem)
    return evaluator.misses(from_plan(plan, evaluator.weights), _cache_slots(plan))


def _cache_slots(plan: Plan) -> list[int]:
    return [plan.cache_slots(i) for i in range(len(plan.layers))]


def log_plan(plan: Plan) -> None:
    """Say what the plan gives to whom, what it promises, and its advice."""
    pinned = [sum(1 for who in row if who) for row in plan.residency]
    log.info(
        "plan",
        **{node.name: format_bytes(plan.bytes_on(i)) for i, node in enumerate(plan.nodes)},
        in_memory=f"{sum(pinned)}/{len(pinned) * plan.num_experts}",
        whole_layers_at_home=sum(plan.is_whole(i) for i in range(len(plan.layers))),
        predicted_step=format_seconds(plan.predicted.step_s) if plan.predicted is not None else "not measured",
    )
    for sentence in plan.advice:
        log.info(sentence)
