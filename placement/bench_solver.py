"""`titan bench solver`: certified gaps, times and ratios of the search on real shapes; small problems against HiGHS."""

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

from titan.placement.bench_cases import Case, cases, small_case
from titan.placement.evaluate import Evaluator
from titan.placement.problem import Problem
from titan.placement.solver import solve
from titan.placement.solver.exact import by_counts, by_routing

Shapes = Annotated[str, typer.Option(help="Shapes, comma-separated.")]
Nodes = Annotated[str, typer.Option(help="Numbers of nodes, comma-separated.")]
Skews = Annotated[str, typer.Option(help="Zipf exponents, comma-separated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SHAPES, NODES, SKEWS, SEEDS = "olmoe,qwen3_235b_a22b,deepseek_v3", "2,4,8", "0,0.5,1", 50
QUICK = ("olmoe", "4", "0.5", 5)
HIGHS_S, QUICK_HIGHS_S = 30.0, 3.0


@dataclass(frozen=True, slots=True)
class SolverRow:
    """One solved problem: the certified gap, seconds by clock and by CPU, the step, the process's peak memory so far,
    and how many times as long as the plan's the naive placements' steps are."""

    case: Case
    gap: float
    seconds: float
    cpu_seconds: float
    step_ms: float
    peak_bytes: int
    baselines: dict[str, float]

    @property
    def worst_ratio(self) -> float:
        return min(self.baselines.values())


@dataclass(frozen=True, slots=True)
class SmallRow:
    """A small problem: the search's step, HiGHS's best and whether it is proven, the certified bound; seconds."""

    step_s: float
    best_s: float
    proven: bool
    bound_s: float


def solver_command(
    shapes: Shapes = SHAPES,
    nodes: Nodes = NODES,
    skews: Skews = SKEWS,
    workers: Annotated[str, typer.Option(help="even, uneven (unlike speed and distance), or both.")] = "even,uneven",
    links: Annotated[str, typer.Option(help="slow (500 us a round trip), fast (50 us), or both.")] = "slow,fast",
    memory: Annotated[str, typer.Option(help="fits, tight (80 %), spare (130 %), comma-separated.")] = "fits",
    seeds: Annotated[int, typer.Option(min=0, max=1000, help="Small instances to compare with HiGHS.")] = SEEDS,
    limit_s: Annotated[float, typer.Option(min=0, max=600, help="Seconds a search may take.")] = 30.0,
    quick: Annotated[bool, typer.Option("--quick", help="A few rows in about 20 s.")] = False,
    as_json: Json = False,
) -> None:
    """Certified gaps and times on real shapes; small instances against HiGHS's optimum."""
    console = Console(stderr=as_json, highlight=False)
    highs_s = HIGHS_S
    if quick:
        (shapes, nodes, skews, seeds), highs_s = QUICK, QUICK_HIGHS_S
    small = [row for flat in (True, False) for row in _small(seeds if flat else seeds // 5, flat, highs_s)]
    if proven := [r for r in small if r.proven]:
        console.print(
            f"{len(proven)} of {len(small)} small instances proven by HiGHS: step at most "
            f"{max(r.step_s / r.best_s for r in proven):.4f} of the optimum, bound at most "
            f"{max(r.bound_s / r.best_s for r in proven):.6f} of it"
        )
    rows = []
    wanted = {"workers": workers.split(","), "links": links.split(","), "memory": memory.split(",")}
    for case, problem in cases(shapes, nodes, skews, **wanted):
        rows.append(_solve(case, problem, limit_s))
        console.print(_line(rows[-1]), soft_wrap=True)
    if rows:
        console.print(
            f"largest gap {max(r.gap for r in rows):.2%}, longest {max(r.seconds for r in rows):.1f} s, "
            f"smallest naive ÷ plan {min(r.worst_ratio for r in rows):.3f}, "
            f"peak memory {rows[-1].peak_bytes / 2**20:.0f} MiB"
        )
    if as_json:
        typer.echo(json.dumps({"rows": [asdict(r) for r in rows], "small": [asdict(r) for r in small]}))


def _solve(case: Case, problem: Problem, limit_s: float) -> SolverRow:
    started, cpu = time.perf_counter(), time.process_time()
    plan = solve(problem, time_limit_s=limit_s)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    assert plan.predicted is not None
    assert plan.gap is not None
    step_s = plan.predicted.step_s
    ratios = {name: p.step_s / step_s for name, p in plan.baselines.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return SolverRow(case, plan.gap, seconds, cpu_seconds, step_s * 1e3, peak, ratios)


def _line(row: SolverRow) -> str:
    case = row.case
    ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in row.baselines.items())
    return (
        f"{case.shape:<16} {case.nodes} nodes zipf {case.zipf:<4g} {case.workers:<6} {case.link:<4} {case.memory:<5} "
        f"gap {row.gap:6.2%} {row.seconds:5.1f} s (CPU {row.cpu_seconds:4.1f} s) {row.peak_bytes / 2**20:4.0f} MiB  "
        f"step {row.step_ms:8.2f} ms  naive ÷ plan: {ratios}"
    )


def _small(seeds: int, flat: bool, highs_s: float) -> Iterator[SmallRow]:
    """Random small instances, solved by the search and by HiGHS."""
    for seed in range(seeds):
        problem = small_case(seed, flat=flat)
        evaluator = Evaluator(problem)
        plan = solve(problem)
        best, proven = (by_counts(evaluator), True) if flat else by_routing(evaluator, highs_s)
        assert plan.predicted is not None
        assert plan.lower_bound_s is not None
        yield SmallRow(plan.predicted.step_s, best, proven, plan.lower_bound_s)
