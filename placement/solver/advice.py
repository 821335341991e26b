"""The plan in plain words: what each node does, what it costs, and what is not worth having. Knows finished plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from titan.common.units import format_bytes as size
from titan.common.units import format_seconds as lasts
from titan.placement.evaluate import MISS, Evaluator, Ints, executors
from titan.placement.plan import Plan
from titan.placement.values import Node

WORTH = 1.005  # a worker earns its place when the step without it is this much longer


def explain(plan: Plan, without: Mapping[str, float], drawn_anew_s: float | None = None) -> tuple[str, ...]:
    """Sentences for people.

    Args:
        plan: with its prediction and baselines.
        without: expected step in seconds when a worker, by name, is left out; only those that were tried.
        drawn_anew_s: the plan's step if rows did not resemble the rows before; None when it was predicted so.
    """
    if plan.predicted is None or plan.predicted.step_s <= 0:
        return ()
    step, total = plan.predicted.step_s, len(plan.layers)
    home, whole = plan.nodes[0], sum(plan.is_whole(i) for i in range(total))
    out = [
        f"{home.name} keeps {whole} of {total} MoE layers whole, {sum(map(len, plan.held_by(0)))} experts pinned "
        f"({size(plan.bytes_on(0))} with cache slots); whole layers pay neither round trip nor synchronisation."
    ]
    for index, node in enumerate(plan.nodes[1:], start=1):
        out.append(_worker(plan, index, node, step, without.get(node.name)))
    if missing := sum(plan.read_by(n) for n in range(len(plan.nodes))):
        what = "expert is" if missing == 1 else "experts are"
        out.append(
            f"{missing} {what} in nobody's memory and read from {_disks(plan)}: "
            f"{lasts(plan.predicted.stall_s)} of the {lasts(step)} step is that stall."
        )
        if drawn_anew_s is not None:
            out.append(
                f"That counts with rows selecting experts of the rows before again as they were seen to; if none did, "
                f"a step would take {lasts(drawn_anew_s)}, and the lower bound and the gap are about such rows."
            )
        elif plan.lower_bound_s:
            spared = "caches spare" if plan.reads else f"{home.name}'s cache spares"
            out.append(
                "The lower bound takes rows as independent of the rows before: where they select the same experts "
                f"again, {spared} reads, and steps can be shorter."
            )
    if len(plan.nodes) > 1:
        out.append(_alone(plan, step))
    return tuple(out)


def about_reads(evaluator: Evaluator, plan: Plan, place: Ints, without_s: float) -> tuple[str, ...]:
    """What each worker reads from its own disk, and what that saves; nothing to say where none does.

    Args:
        without_s: expected step when node 0 reads all of it.
    """
    out = []
    for n in np.unique(MISS - place[place < MISS]).tolist():
        reads = sum(float(evaluator.frequencies(i)[row == MISS - n].sum()) for i, row in enumerate(place))
        layers = sum(bool((row == MISS - n).any()) for row in place)
        slots = sum(plan.cache_slots(i, n) for i, experts in enumerate(plan.served_by(n)) if experts)
        out.append(
            f"{plan.nodes[n].name} reads {reads:.1f} experts a token from its own disk, "
            f"{lasts(plan.nodes[n].ssd_s)} each ({plan.nodes[n].readers} at once), in {layers} layers with {slots} "
            "cache slots together."
        )
    if out:
        step_s = evaluator.step(place)
        out.append(
            f"Without workers' disks a step would take {lasts(without_s)} instead of {lasts(step_s)}; "
            "the lower bound takes it that they read in no time."
        )
    return tuple(out)


def about_precision(evaluator: Evaluator, place: Ints) -> tuple[str, ...]:
    """What wire precision `reduced` would gain over `exact` with this arrangement; nothing to say without workers."""
    problem = evaluator.problem
    if problem.reduced or not problem.activation_bytes or not (executors(place) > 0).any():
        return ()
    pairs, rows = evaluator.results(place)
    step, other = evaluator.step(place), Evaluator(replace(problem, reduced=True), like=evaluator).step(place)
    kib = problem.activation_bytes / 1024
    return (
        f"`precision: reduced` would bring back {rows * kib:.1f} KiB a token instead of {pairs * kib:.1f} KiB and take "
        f"{lasts(other)} instead of {lasts(step)} a step, with results that are no longer mlx-lm's to the bit.",
    )


def _worker(plan: Plan, index: int, node: Node, step: float, alone: float | None) -> str:
    rows = list(zip(plan.held_by(index), plan.served_by(index), strict=True))
    layers, experts = sum(bool(held or served) for held, served in rows), sum(len(held) for held, _ in rows)
    experts += plan.kept_by(index)
    if not layers:
        return f"{node.name} holds nothing and does not earn its place: its figures make every use of it slower."
    text = (
        f"{node.name}'s link costs {lasts(node.round_trip_s)} a layer: it serves {layers} of {len(plan.layers)} layers "
        f"with {experts} experts in memory ({size(plan.bytes_on(index))})"
    )
    if alone is None:
        return text + "."
    if alone < step * WORTH:
        return text + f"; it does not earn its place: without it a step takes {lasts(alone)} instead of {lasts(step)}."
    return (
        text + f"; without it a step takes {lasts(alone)} instead of {lasts(step)} ({alone / step:.2f} times as long)."
    )


def _alone(plan: Plan, step: float) -> str:
    home, one = plan.nodes[0].name, plan.baselines.get("one_node")
    if one is None or not any(map(any, plan.slots[1:])):
        return f"{home} alone is the fastest arrangement of these nodes."
    if one.step_s <= step:
        return f"{home} alone is faster: {1 / one.step_s:.1f} tokens/s against {1 / step:.1f} with the workers."
    return f"{home} alone would reach {1 / one.step_s:.1f} tokens/s, the plan {1 / step:.1f} (batch 1)."


def _disks(plan: Plan) -> str:
    """Whose disks no memory's experts are read from, and how many from each."""
    read = [(node.name, plan.read_by(n)) for n, node in enumerate(plan.nodes)]
    some = [(name, count) for name, count in read if count]
    if len(some) == 1:
        return f"{some[0][0]}'s SSD"
    return "SSDs (" + ", ".join(f"{name}'s {count}" for name, count in some) + ")"
