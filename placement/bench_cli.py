"""`titan bench solver` and `titan bench plan`: gaps, times and ratios of the search; predictions beside replays."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from titan.placement.bench_cases import cluster, shape_case, small_case
from titan.placement.evaluate import Evaluator
from titan.placement.problem import Problem
from titan.placement.replay import replay_plan
from titan.placement.shapes import find_shape
from titan.placement.solver import solve
from titan.placement.solver.exact import by_counts, by_routing
from titan.placement.synthetic import synthetic_trace
from titan.placement.trace import TraceHeader

Shapes = Annotated[str, typer.Option(help="Shapes, comma-separated.")]
Nodes = Annotated[str, typer.Option(help="Numbers of nodes, comma-separated.")]
Skews = Annotated[str, typer.Option(help="Zipf exponents, comma-separated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class SolverRow:
    """One solved problem: the certified gap, the seconds it took, the step, and the best naive placement's ratio."""

    shape: str
    nodes: int
    zipf: float
    case: str
    gap: float
    seconds: float
    step_ms: float
    worst_ratio: float
    baselines: dict[str, float]


def register_bench(app: typer.Typer) -> None:
    app.command("solver")(solver_command)
    app.command("plan")(plan_command)


def solver_command(
    shapes: Shapes = "olmoe,qwen3_235b_a22b,deepseek_v3",
    nodes: Nodes = "2,4,8",
    skews: Skews = "0,0.25,0.5",
    seeds: Annotated[int, typer.Option(min=0, max=1000, help="Small instances to compare with HiGHS.")] = 50,
    uneven: Annotated[bool, typer.Option(help="Workers of unlike speed and distance too.")] = False,
    as_json: Json = False,
) -> None:
    """Certified gaps and times on real shapes; small instances against HiGHS's optimum."""
    console = Console(stderr=as_json, highlight=False)
    small = [row for flat in (True, False) for row in _small(seeds if flat else seeds // 5, flat)]
    if small:
        proven = [r for r in small if r[2]]
        console.print(
            f"{len(proven)} of {len(small)} small instances proven by HiGHS: step at most "
            f"{max(r[0] / r[1] for r in proven):.4f} of the optimum, bound at most "
            f"{max(r[3] / r[1] for r in proven):.6f} of it"
        )
    rows = []
    for case in _cases(shapes, nodes, skews, uneven):
        rows.append(_solve(*case))
        console.print(_line(rows[-1]), soft_wrap=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if rows:
        console.print(
            f"largest gap {max(r.gap for r in rows):.2%}, longest {max(r.seconds for r in rows):.1f} s, "
            f"smallest naive ÷ plan {min(r.worst_ratio for r in rows):.3f}, peak memory {peak / 2**20:.0f} MiB"
        )
    if as_json:
        typer.echo(json.dumps({"rows": [asdict(r) for r in rows], "peak_bytes": peak, "small": small}))


def _cases(shapes: str, nodes: str, skews: str, uneven: bool) -> Iterator[tuple[str, int, float, str, Problem]]:
    for name in shapes.split(","):
        shape = find_shape(name)
        for count in map(int, nodes.split(",")):
            for zipf in map(float, skews.split(",")):
                kinds = {"fits": {}, "tight": {"total": 0.8}, "spare": {"total": 1.3}}
                if uneven:
                    kinds["uneven"] = {"uneven": True}
                for case, kwargs in kinds.items():
                    yield shape.name, count, zipf, case, shape_case(shape, cluster(shape, count, **kwargs), zipf)


def _solve(shape: str, nodes: int, zipf: float, case: str, problem: Problem) -> SolverRow:
    started = time.perf_counter()
    plan = solve(problem)
    seconds = time.perf_counter() - started
    assert plan.predicted is not None
    assert plan.gap is not None
    ratios = {name: p.step_s / plan.predicted.step_s for name, p in plan.baselines.items()}
    return SolverRow(
        shape, nodes, zipf, case, plan.gap, seconds, plan.predicted.step_s * 1e3, min(ratios.values()), ratios
    )


def _line(row: SolverRow) -> str:
    ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in row.baselines.items())
    return (
        f"{row.shape:<16} {row.nodes} nodes zipf {row.zipf:<4g} {row.case:<6} gap {row.gap:6.2%} {row.seconds:5.1f} s  "
        f"step {row.step_ms:8.2f} ms  naive ÷ plan: {ratios}"
    )


def _small(seeds: int, flat: bool) -> Iterator[tuple[float, float, bool, float]]:
    """(step of the search, HiGHS's best, whether proven, lower bound) of random small instances."""
    for seed in range(seeds):
        problem = small_case(seed, flat=flat)
        evaluator = Evaluator(problem)
        plan = solve(problem)
        best, proven = (by_counts(evaluator), True) if flat else by_routing(evaluator, 30.0)
        assert plan.predicted is not None
        assert plan.lower_bound_s is not None
        yield plan.predicted.step_s, best, proven, plan.lower_bound_s


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
    for shape, count, zipf, case, problem in _cases(shapes, nodes, skews, uneven=False):
        plan = solve(problem)
        assert plan.predicted is not None
        header = TraceHeader(problem.fingerprint, problem.layers, problem.num_experts, problem.top_k)
        runs = []
        for reuse in (0.0, 0.4):
            trace = synthetic_trace(header, steps, zipf=zipf, reuse=reuse, seed=1)
            if zipf and problem.frequencies is not None:
                trace = _relabel(trace, problem)
            runs.append(replay_plan(plan, problem, trace).step_s * 1e3)
        step = plan.predicted.step_s * 1e3
        figures = {"predicted_ms": step, "replayed_ms": runs}
        rows.append({"shape": shape, "nodes": count, "zipf": zipf, "case": case} | figures)
        cells = [f"{x:.2f}" for run in runs for x in (run, run / step)]
        table.add_row(shape, str(count), f"{zipf:g}", case, f"{step:.2f}", *cells)
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
