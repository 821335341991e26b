"""`titan calibrate`: measure this cluster's figures and show them. Only wires and shows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from titan.common.log import setup_logging
from titan.common.units import format_bytes, format_seconds
from titan.placement.figures import Figures

NOISY = 0.3
QUIET_CORES = 0.25


def register(app: typer.Typer) -> None:
    app.command("calibrate")(calibrate)


def calibrate(
    hosts: Annotated[Path, typer.Option(help="Description of the cluster.")] = Path("hosts.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what placement needs: experts, attention and disk here, and each worker over its link."""
    from titan.coordinator.operator import cluster_of  # loads MLX

    setup_logging("text", "WARNING")
    status = Console(stderr=True).status("opening the model")
    with status, cluster_of(hosts, measure_again=True, report=status.update) as cluster:
        cluster.load_host()
        figures = cluster.measured_figures()
        memory = {link.name: link.memory_budget_bytes for link in cluster.links}
        absent = {s.name: s.reason for s in cluster.workers.status() if s.name not in figures.workers}
        experts_bytes = cluster.memory.experts_bytes
    if as_json:
        report = asdict(figures) | {"memory_bytes": {"home": experts_bytes} | memory, "not_measured": absent}
        typer.echo(json.dumps(report))
        return
    show_figures(figures, experts_bytes, memory, absent)


def show_figures(figures: Figures, home_bytes: int, memory: dict[str, int | None], absent: dict[str, str]) -> None:
    """Print this machine's figures and, by worker, how it looks from here; `absent`: worker -> why it is not known."""
    console = Console()
    home = figures.home
    table = Table(title="this machine", title_justify="left", show_header=False)
    rows = (
        ("memory for experts (M_0)", format_bytes(home_bytes)),
        ("a layer without its experts (tau)", format_seconds(home.attention_s)),
        (
            "asking a layer (synchronisation)",
            f"{format_seconds(home.sync_s)} + {format_seconds(home.choice_s)} to choose among workers",
        ),
        (
            "an expert on one row (c_0)",
            f"{format_seconds(home.compute_s)} + {format_seconds(home.compute_fixed_s)} a layer",
        ),
        (
            "an expert from disk (lambda)",
            f"{format_seconds(home.ssd_s)} cold, {format_seconds(home.page_cache_s)} cached",
        ),
        ("parallel readers that help (w)", str(home.readers)),
        ("package power under load (P_0)", _watts(home.power_w)),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    table = Table(title="workers, as this machine sees them", title_justify="left")
    table.add_column("worker", no_wrap=True)
    for column in ("memory (M_n)", "used", "address", "over", "rho", "c_n", "beta", "power (P_n)"):
        table.add_column(column, overflow="fold")
    for name, chosen in figures.workers.items():
        for worker in (chosen, *figures.elsewhere.get(name, ())):
            first = worker is chosen
            table.add_row(
                name if first else "",
                format_bytes(memory.get(name) or 0) if first else "",
                "yes" if first else "to fall back on",
                worker.address,
                worker.transport,
                format_seconds(worker.round_trip_s),
                format_seconds(worker.compute_s),
                f"{format_bytes(int(worker.bandwidth_bytes_s))}/s" if worker.bandwidth_bytes_s else "not the limit",
                _watts(worker.power_w) if first else "",
            )
    console.print(table)
    for name, worker in figures.workers.items():
        if worker.ssd_s is not None:
            console.print(
                f"{name} reads an expert from its own disk in {format_seconds(worker.ssd_s)} (lambda_n), "
                f"{worker.readers} at once help (w_n)",
                markup=False,
                soft_wrap=True,
            )
    for name, addresses in figures.unreached.items():
        console.print(f"{name} did not answer at {', '.join(addresses)}", markup=False, soft_wrap=True)
    for name, reason in absent.items():
        console.print(f"{name} was not measured: {reason or 'it has no memory for one row of experts'}", markup=False)
    noisy = [n for n, f in [("this machine", home), *figures.workers.items()] if f.spread > NOISY]
    noisy += [f"the disk of {n}" for n, f in figures.workers.items() if f.ssd_spread > NOISY]
    if home.others_cores > QUIET_CORES:
        console.print(
            f"other programs used {home.others_cores:.1f} cores of this machine all the time; measure again when idle"
        )
    if noisy:
        console.print(f"noisy: {', '.join(noisy)} (spread above {NOISY:.0%} of the median); measure again when idle")


def _watts(power_w: float | None) -> str:
    return "the system does not tell" if power_w is None else f"{power_w:.1f} W"
