"""`titan plan` for machines given by their figures, and `titan simulate`. Only wires and shows."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from titan.common.errors import ConfigError, PlanError, TitanError
from titan.common.units import format_seconds
from titan.placement import bench_cli, solve
from titan.placement.nodes_file import load_nodes
from titan.placement.plan import Plan
from titan.placement.problem import Problem
from titan.placement.reuse import reuse_of
from titan.placement.routing import zipf_layers
from titan.placement.shapes import SHAPES, find_shape, shape_problem
from titan.placement.show import plan_report, show_plan, write_file
from titan.placement.study import Study, study_tables
from titan.placement.svg import plan_svg
from titan.placement.synthetic import synthetic_trace
from titan.placement.trace import Trace, TraceHeader
from titan.placement.trace_read import read_trace

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")]
ShapeOption = Annotated[str | None, typer.Option(help=f"A published shape: {', '.join(sorted(SHAPES))}.")]
ZipfOption = Annotated[float, typer.Option(min=0.0, max=4.0, help="Skew of the routing: weights i^-ZIPF, 0 is flat.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of search and sampling.")]


def register(app: typer.Typer) -> None:
    """Mount `plan` and `simulate` on the operator's tool."""
    app.command("plan")(plan_command)
    app.command("simulate")(simulate_command)


def register_bench(app: typer.Typer) -> None:
    """Mount `solver` and `plan` under `titan bench`."""
    bench_cli.register_bench(app)


def plan_command(
    nodes: Annotated[Path, typer.Option(help="Figures of the machines.")],
    shape: ShapeOption = None,
    trace: Annotated[Path | None, typer.Option(help="Take expert frequencies and reuse from this trace.")] = None,
    zipf: ZipfOption = 0.0,
    out: Annotated[Path | None, typer.Option(help="Write the plan, for `titan-coordinator --plan`.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture: layers × experts coloured by node.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.0, max=3600.0, help="Seconds to search.")] = 30.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Plan machines one may not have yet, from given figures: what would another Mac bring?"""
    try:
        problem = _problem(nodes, shape, trace, zipf)
        with Console(stderr=True).status("planning"):
            plan = solve(problem, time_limit_s=time_limit, seed=seed)
        if out is not None:
            write_file(out, plan.to_json())
        if svg is not None:
            write_file(svg, plan_svg(plan))
    except TitanError as error:
        _fail(error, as_json)
        return
    if as_json:
        typer.echo(json.dumps(plan_report(plan)))
        return
    show_plan(plan, Console(highlight=False, markup=False))


def _problem(nodes: Path, shape: str | None, trace: Path | None, zipf: float) -> Problem:
    given = load_nodes(nodes)
    if shape is None:
        raise ConfigError("no shape is given", f"add --shape with one of {', '.join(sorted(SHAPES))}")
    found = find_shape(shape)
    attention = None if given.attention_us is None else given.attention_us * 1e-6
    problem = shape_problem(found, given.nodes(), attention_s=attention)
    if given.sync_us is not None:
        problem = replace(problem, sync_s=given.sync_us * 1e-6)
    if trace is not None:
        header = TraceHeader(problem.fingerprint, problem.layers, problem.num_experts, problem.top_k)
        read = _same_sizes(read_trace(trace, min_rows=1), header)
        rows = read.frequencies().tolist()
        return replace(problem, frequencies=tuple(tuple(row) for row in rows), reuse=reuse_of(read))
    if zipf:
        frequencies = zipf_layers(len(problem.layers), problem.num_experts, problem.top_k, zipf)
        return replace(problem, frequencies=frequencies)
    return problem


def _same_sizes(trace: Trace, header: TraceHeader) -> Trace:
    mine = (header.num_experts, header.top_k, len(header.layers))
    got = (trace.header.num_experts, trace.header.top_k, len(trace.header.layers))
    if mine != got:
        raise PlanError(
            f"the trace has {got[0]} experts, top-{got[1]}, {got[2]} MoE layers; the shape has {mine[0]}, {mine[1]}, "
            f"{mine[2]}",
            "use a trace of this model",
        )
    return trace


def simulate_command(
    trace: Annotated[Path | None, typer.Option(help="A trace that the coordinator recorded.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Replay this plan as well.")] = None,
    shape: ShapeOption = None,
    zipf: ZipfOption = 0.0,
    reuse: Annotated[float, typer.Option(min=0.0, max=1.0, help="Made-up trace: extra reuse from row to row.")] = 0.0,
    rows: Annotated[int, typer.Option(min=2, max=100_000, help="Rows to replay.")] = 500,
    capacities: Annotated[str, typer.Option(help="Slots a layer, comma-separated; by default from K to E.")] = "",
    depths: Annotated[str, typer.Option(help="Prefetch depths, comma-separated.")] = "1,2,4",
    fetch_us: Annotated[float, typer.Option(min=0.0, max=60e6, help="Reading one expert (lambda).")] = 430.0,
    layer_us: Annotated[float, typer.Option(min=0.0, max=60e6, help="Decode time of a layer (tau).")] = 128.0,
    readers: Annotated[int, typer.Option(min=1, max=64, help="Parallel readers (w).")] = 4,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace through slot tables, predictors and a plan. Without --trace, one is made up for --shape."""
    try:
        routing = _routing(trace, shape, zipf, reuse, rows, seed)
        study = Study.of(
            routing,
            capacities=_numbers(capacities, routing.header.top_k, routing.header.num_experts, "--capacities"),
            depths=_numbers(depths, 1, len(routing.header.layers), "--depths"),
            fetch_s=fetch_us * 1e-6,
            layer_s=layer_us * 1e-6,
            readers=readers,
            plan=None if plan is None else _read_plan(plan),
        )
    except TitanError as error:
        _fail(error, as_json)
        return
    if as_json:
        typer.echo(json.dumps(asdict(study)))
        return
    console = Console(highlight=False)
    for table in study_tables(study):
        console.print(table)
    if study.replay is not None:
        _show_replay(study, console)


def _show_replay(study: Study, console: Console) -> None:
    run = study.replay
    assert run is not None
    table = Table(title="the plan under this trace", title_justify="left", show_header=False)
    table.add_row("step", format_seconds(run.step_s))
    if study.predicted_step_s is not None:
        table.add_row("predicted step", format_seconds(study.predicted_step_s))
    table.add_row("of it SSD stall", format_seconds(run.stall_s))
    total = max(1, run.local + run.remote + run.ssd)
    for name, number in (("local", run.local), ("remote", run.remote), ("from SSD", run.ssd)):
        table.add_row(f"pairs {name}", f"{number / total:.1%}")
    table.add_row("hit rate of the cache slots", f"{run.cache_hit_rate:.3f}")
    console.print(table)


def _routing(trace: Path | None, shape: str | None, zipf: float, reuse: float, rows: int, seed: int) -> Trace:
    if trace is not None:
        return read_trace(trace, max_rows=rows, min_rows=2)
    if shape is None:
        raise ConfigError("there is nothing to replay", "give --trace FILE, or --shape NAME to make a trace up")
    found = find_shape(shape)
    header = TraceHeader(f"shape:{found.name}", found.moe_indexes, found.num_experts, found.top_k)
    return synthetic_trace(header, rows, zipf=zipf, reuse=reuse, seed=seed)


def _read_plan(path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the plan {path} cannot be read ({error})", "check the path") from error


def _numbers(text: str, low: int, high: int, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = (low - 1,)
    if any(not low <= n <= high for n in numbers) or len(numbers) > 32:
        raise ConfigError(f"{option} is {text!r}", f"give numbers from {low} to {high}, separated by commas")
    return numbers


def _fail(error: TitanError, as_json: bool) -> None:
    if not as_json:
        raise error
    value = {"code": error.code, "message": str(error), "cause": error.cause, "mend": error.mend}
    typer.echo(json.dumps({"error": value}))
    raise typer.Exit(error.exit_status)
