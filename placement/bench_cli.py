"""`titan bench plan`: predicted steps beside replays of made-up traces; mounts `titan bench solver` too."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from titan.placement.bench_cases import cases
from titan.placement.bench_solver import Json, Nodes, Shapes, Skews, solver_command
from titan.placement.problem import Problem
from titan.placement.replay import replay_plan
from titan.placement.solver import solve
from titan.placement.synthetic import synthetic_trace
from titan.placement.trace import TraceHeader


def register_bench(app: typer.Typer) -> None:
    app.command("solver")(solver_command)
    app.command("plan")(plan_command)


def plan_command(
    shapes: Shapes = "olmoe,qwen3_235b_a22b,deepseek_v3",
    nodes: Nodes = "2,4",
    skews: Skews = "0,0.5",
    steps: Annotated[int, typer.Option(min=10, max=100_000, help="Steps to replay.")] = 200,
    as_json: Json = False,
) -> None:
    """Predicted steps beside replays of traces with independent rows, and with reuse from row to row."""
    table = Table(title="predicted and replayed step", title_justify="left")
    for column in ("shape", "nodes", "zipf", "case", "predicted ms", "replayed", "÷", "with reuse", "÷"):
        table.add_column(column, justify="left" if column in ("shape", "case") else "right")
    rows = []
    for case, problem in cases(shapes, nodes, skews, memory=("fits", "tight", "spare")):
        plan = solve(problem)
        assert plan.predicted is not None
        header = TraceHeader(problem.fingerprint, problem.layers, problem.num_experts, problem.top_k)
        runs = []
        for reuse in (0.0, 0.4):
            trace = synthetic_trace(header, steps, zipf=case.zipf, reuse=reuse, seed=1)
            if case.zipf and problem.frequencies is not None:
                trace = _relabel(trace, problem)
            runs.append(replay_plan(plan, problem, trace).step_s * 1e3)
        step = plan.predicted.step_s * 1e3
        figures = {"predicted_ms": step, "replayed_ms": runs}
        rows.append({"shape": case.shape, "nodes": case.nodes, "zipf": case.zipf, "case": case.memory} | figures)
        cells = [f"{x:.2f}" for run in runs for x in (run, run / step)]
        table.add_row(case.shape, str(case.nodes), f"{case.zipf:g}", case.memory, f"{step:.2f}", *cells)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    Console(highlight=False).print(table)


def _relabel(trace, problem: Problem):
    """Give every layer's experts the problem's order of frequency instead of the generator's."""
    import numpy as np

    from titan.placement.trace import Trace

    ids, seen = trace.ids.copy(), trace.frequencies()
    for layer, wanted in enumerate(problem.frequencies or ()):
        names = np.empty(problem.num_experts, dtype=np.uint16)
        names[np.argsort(-seen[layer], kind="stable")] = np.argsort(-np.array(wanted), kind="stable")
        ids[:, layer] = names[ids[:, layer]]
    return Trace(trace.header, ids, trace.step)
