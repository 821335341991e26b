"""`titan bench net` and `titan bench layer`: what the way to a worker costs."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from titan.common.errors import ConfigError

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register_bench(app: typer.Typer) -> None:
    """Mount the commands under `titan bench`."""
    app.command("net")(net_command)


def net_command(
    loopback: Annotated[bool, typer.Option("--loopback", help="Between two processes of this machine.")] = False,
    round_trips: Annotated[int, typer.Option(min=25, max=1_000_000, help="Of each variant at each size.")] = 2000,
    cores: Annotated[Literal["same", "apart", "free"], typer.Option(help="Where the two ends run, on Linux.")] = "same",
    as_json: JsonOption = False,
) -> None:
    """Round trips over lane, gRPC, bare TLS and bare TCP, interleaved; needs no cluster."""
    from titan.coordinator.bench.net import VARIANTS, bench_loopback  # loads MLX

    if not loopback:
        raise ConfigError("titan bench net measures loopback only", "give --loopback")
    with Console(stderr=True).status("starting an echoing worker") as status:
        figures = bench_loopback(round_trips, cores, lambda size: status.update(f"{size} bytes"))
    if as_json:
        middle = figures[len(figures) // 2]
        flat = {f"{name}_us_p50": middle.p50_us[name] for name in VARIANTS}
        flat |= {f"{name}_us_p95": middle.p95_us[name] for name in VARIANTS}
        sizes = [
            {"payload_bytes": f.payload_bytes, "p50_us": f.p50_us, "p95_us": f.p95_us, "lane_over_tls": f.ratio}
            for f in figures
        ]
        flat |= {"payload_bytes": middle.payload_bytes, "lane_over_tls": middle.ratio, "cores": cores}
        typer.echo(json.dumps(flat | {"sizes": sizes}))
        return
    table = Table(title=f"round trips over loopback, {round_trips} each, both ends on cores: {cores}; p50 / p95 in µs")
    table.add_column("bytes", justify="right")
    for name in VARIANTS:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("lane ÷ TLS", justify="right")
    for f in figures:
        cells = [f"{f.p50_us[name]:.1f} / {f.p95_us[name]:.1f}" for name in VARIANTS]
        table.add_row(str(f.payload_bytes), *cells, f"{f.ratio:.2f}")
    Console().print(table)
