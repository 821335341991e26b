"""`titan plan`: for the machines of a hosts.yaml, measured, or for machines one does not have, from given figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from titan.common.errors import ConfigError, TitanError
from titan.common.log import setup_logging
from titan.placement import Plan
from titan.placement import cli as placement_cli
from titan.placement.reuse import reuse_of
from titan.placement.show import plan_report, show_plan, write_file
from titan.placement.svg import plan_svg
from titan.placement.trace_read import read_trace


def register(app: typer.Typer) -> None:
    """Mount `plan` and `simulate`."""
    app.command("plan")(plan)
    app.command("simulate")(placement_cli.simulate_command)


def plan(
    hosts: Annotated[Path | None, typer.Option(help="Plan for this cluster, measured now or before.")] = None,
    nodes: Annotated[Path | None, typer.Option(help="Plan for machines with these figures instead.")] = None,
    shape: placement_cli.ShapeOption = None,
    trace: Annotated[Path | None, typer.Option(help="Take expert frequencies and reuse from this trace.")] = None,
    zipf: placement_cli.ZipfOption = 0.0,
    out: Annotated[Path | None, typer.Option(help="Write the plan, for `titan-coordinator --plan`.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture: layers × experts coloured by node.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.0, max=3600.0, help="Seconds to search.")] = 30.0,
    seed: placement_cli.SeedOption = 0,
    replan: Annotated[bool, typer.Option("--replan", help="Measure again instead of using kept figures.")] = False,
    as_json: placement_cli.JsonOption = False,
) -> None:
    """Who should hold which expert, what that is predicted to bring, and why."""
    if (hosts is None) == (nodes is None):
        raise ConfigError("titan plan needs --hosts or --nodes", "give one of them")
    if nodes is not None:
        placement_cli.plan_command(nodes, shape, trace, zipf, out, svg, time_limit, seed, as_json)
        return
    assert hosts is not None
    if shape is not None or zipf:
        raise ConfigError("--shape and --zipf go with --nodes", "leave them out: the checkpoint's shape is used")
    try:
        found = _plan_for(hosts, trace, time_limit, replan)
        if out is not None:
            write_file(out, found.to_json())
        if svg is not None:
            write_file(svg, plan_svg(found))
    except TitanError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"error": {"code": error.code, "message": str(error)}}))
        raise typer.Exit(error.exit_status) from error
    if as_json:
        typer.echo(json.dumps(plan_report(found)))
        return
    show_plan(found, Console(highlight=False, markup=False))


def _plan_for(hosts: Path, trace: Path | None, time_limit_s: float, replan: bool) -> Plan:
    """Greet, measure what is not known yet, solve. Workers that are not there are left out, with a warning."""
    from titan.coordinator.operator import cluster_of  # loads MLX

    setup_logging("text", "WARNING")
    status = Console(stderr=True).status("opening the model")
    with status, cluster_of(hosts, measure_again=replan, report=status.update) as cluster:
        frequencies, reuse = None, None
        if trace is not None:
            read = read_trace(trace, fingerprint=cluster.checkpoint.shape.fingerprint, min_rows=1)
            frequencies = tuple(tuple(row) for row in read.frequencies().tolist())
            reuse = reuse_of(read)
        cluster.load_host()
        return cluster.make_plan(frequencies=frequencies, reuse=reuse, time_limit_s=time_limit_s)
