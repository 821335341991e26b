"""Plans for people and programs: tables, the JSON report, files. Knows finished plans, nothing of the search."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from titan.common.errors import ConfigError
from titan.common.units import format_bytes, format_seconds
from titan.common.whole_file import whole_file
from titan.placement.plan import Plan
from titan.placement.values import Prediction

__all__ = ["plan_report", "show_plan", "write_file"]


def plan_report(plan: Plan) -> dict[str, object]:
    """What `titan plan --json` prints: times in seconds, sizes in bytes."""
    return {
        "fingerprint": plan.fingerprint,
        "layers": len(plan.layers),
        "num_experts": plan.num_experts,
        "top_k": plan.top_k,
        "nodes": [
            {
                "name": node.name,
                "address": node.address,
                "address_why": node.address_why,
                "power_w": node.power_w,
                "memory_bytes": node.memory_bytes,
                "used_bytes": plan.bytes_on(i),
                "experts": sum(map(len, held)),
                "layers": sum(1 for row in held if row),
                "whole_layers": sum(len(row) == plan.num_experts for row in held),
                "round_trip_s": node.round_trip_s,
                "ssd_s": node.ssd_s,
                "reads_experts": plan.read_by(i),
            }
            for i, node in enumerate(plan.nodes)
            for held in [plan.held_by(i)]
        ],
        "predicted": None if plan.predicted is None else _prediction(plan.predicted),
        "baselines": {name: _prediction(p) for name, p in plan.baselines.items()},
        "lower_bound": plan.lower_bound_s,
        "gap": plan.gap,
        "advice": list(plan.advice),
    }


def _prediction(p: Prediction) -> dict[str, object]:
    return {
        "step_s": p.step_s,
        "attention_s": p.attention_s,
        "sync_s": p.sync_s,
        "compute_s": p.compute_s,
        "round_trip_s": p.round_trip_s,
        "stall_s": p.stall_s,
        "energy_j": p.energy_j,
        "tokens_per_s": {str(rows): rate for rows, rate in p.tokens_per_s},
    }


def show_plan(plan: Plan, console: Console) -> None:
    """Tables of nodes and predictions, the gap, and the advice."""
    reads = ("reads",) if plan.reads else ()
    table = _table("nodes", ("node", "round trip", "experts", *reads, "whole layers", "memory", "of"))
    for i, node in enumerate(plan.nodes):
        held = plan.held_by(i)
        table.add_row(
            node.name,
            format_seconds(node.round_trip_s) if i else "",
            str(sum(map(len, held))),
            *(str(plan.read_by(i)) for _ in reads),
            f"{sum(len(row) == plan.num_experts for row in held)} of {len(held)}",
            format_bytes(plan.bytes_on(i)),
            format_bytes(node.memory_bytes),
        )
    console.print(table)
    for node in plan.nodes:
        if node.address:
            why = f": {node.address_why}" if node.address_why else ""
            console.print(f"{node.name} is reached at {node.address}{why}", soft_wrap=True)
    if plan.predicted is not None:
        console.print(_speeds(plan, plan.predicted))
        console.print(_split(plan, plan.predicted))
        console.print(_energy(plan), soft_wrap=True)
    if plan.gap is not None and plan.lower_bound_s is not None:
        console.print(
            f"No placement on these nodes has a step below {format_seconds(plan.lower_bound_s)} "
            f"(rows independent): this plan's is at most {plan.gap:.1%} longer.",
            soft_wrap=True,
        )
    for sentence in plan.advice:
        console.print(f"- {sentence}", soft_wrap=True)


def _speeds(plan: Plan, predicted: Prediction) -> Table:
    """Tokens a second of this plan and of naive placements."""
    batches = [str(rows) for rows, _ in predicted.tokens_per_s]
    table = _table("tokens/s predicted", ("placement", *(f"batch {rows}" for rows in batches), "step", "÷ plan"))
    for name, p in (("this plan", predicted), *plan.baselines.items()):
        speeds = [f"{rate:.1f}" for _, rate in p.tokens_per_s]
        table.add_row(name.replace("_", " "), *speeds, format_seconds(p.step_s), f"{p.step_s / predicted.step_s:.2f}")
    return table


def _split(plan: Plan, predicted: Prediction) -> Table:
    """Where the time of a step at batch 1 goes."""
    table = _table("where a step goes", ("placement", "attention", "sync", "compute", "round trips", "SSD"))
    for name, p in (("this plan", predicted), *plan.baselines.items()):
        parts = (p.attention_s, p.sync_s, p.compute_s, p.round_trip_s, p.stall_s)
        table.add_row(name.replace("_", " "), *(format_seconds(x) for x in parts))
    return table


def _energy(plan: Plan) -> str:
    """Joules a token, or which nodes do not say what they take."""
    assert plan.predicted is not None
    if plan.predicted.energy_j is not None:
        one = plan.baselines.get("one_node")
        alone = f" ({one.energy_j:.2f} J on {plan.nodes[0].name} alone)" if one and one.energy_j is not None else ""
        return f"Energy: {plan.predicted.energy_j:.2f} J a token while computing{alone}."
    silent = ", ".join(node.name for node in plan.nodes if node.power_w is None)
    return f"Energy: not measured (no power is known of {silent})."


def _table(title: str, columns: tuple[str, ...]) -> Table:
    """A table of at most 80 columns: the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def write_file(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises ConfigError: the folder cannot be written."""
    try:
        with whole_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error})", "check the folder") from error
