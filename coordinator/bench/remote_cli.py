"""`titan bench net`, `layer`, `loss` and `hints`: what the way to a worker costs, losing it, and telling it early."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from titan.common.errors import ConfigError
from titan.common.log import setup_logging
from titan.common.prefetch.build import PREFETCH
from titan.common.prefetch.prefetcher import MAX_PREFETCH
from titan.common.store import CacheMode
from titan.deploy import DEMO_MODEL

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register_bench(app: typer.Typer) -> None:
    """Mount the commands under `titan bench`."""
    app.command("net")(net_command)
    app.command("layer")(layer_command)
    app.command("loss")(loss_command)
    app.command("hints")(hints_command)


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


def layer_command(
    model: Annotated[Path, typer.Option(help="Checkpoint to measure; the demo model by default.")] = DEMO_MODEL,
    repeats: Annotated[int, typer.Option(min=4, max=100_000, help="Layers over each transport.")] = 400,
    decode: Annotated[
        int, typer.Option(min=0, max=10_000, help="Tokens a decoding run over two workers; 0: none.")
    ] = 16,
    runs: Annotated[int, typer.Option(min=1, max=100, help="Decoding runs over each transport.")] = 12,
    as_json: JsonOption = False,
) -> None:
    """What one remote layer costs, part by part, over the lane and over gRPC; and decoding over both."""
    from titan.coordinator.bench.layer import PARTS, bench_decode, bench_layer  # loads MLX

    setup_logging("text", "ERROR")
    with Console(stderr=True).status("starting workers") as status:
        layers = bench_layer(model, repeats, status.update)
        decoded = bench_decode(model, decode, runs, status.update) if decode else None
    if as_json:
        figures = {f.transport: asdict(f) for f in layers}
        typer.echo(json.dumps(figures | {"decode": asdict(decoded) if decoded else None}))
        return
    table = Table(title=f"one remote layer of {model.name}, one row, one worker on loopback; medians in µs")
    for column in ("transport", "total", *PARTS, "bare wire", "beyond compute and bare wire"):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for f in layers:
        cells = [f"{f.total_us:.0f}", *(f"{f.parts_us[part]:.0f}" for part in PARTS)]
        table.add_row(f.transport, *cells, f"{f.bare_wire_us:.0f}", f"{f.beyond_us:.0f}")
    console = Console()
    console.print(table)
    if decoded is not None:
        console.print(
            f"decoding {decoded.tokens} tokens, {decoded.layers} layers, two workers: "
            f"lane {decoded.us_a_layer['lane']:.0f} µs a layer ({decoded.tokens_per_s['lane']:.1f} tokens/s), "
            f"gRPC {decoded.us_a_layer['grpc']:.0f} µs ({decoded.tokens_per_s['grpc']:.1f} tokens/s); "
            f"the lane saves {decoded.saved_us:.0f} µs a layer, {decoded.ratio:.2f} times as fast; "
            f"tokens {'identical' if decoded.identical else 'DIFFER'}"
        )


def loss_command(
    model: Annotated[Path, typer.Option(help="Checkpoint to measure; the demo model by default.")] = DEMO_MODEL,
    tokens: Annotated[int, typer.Option(min=24, max=10_000, help="Of an answer; the fault comes in the middle.")] = 48,
    runs: Annotated[int, typer.Option(min=1, max=100, help="Of each fault.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """What a worker that is killed, or stopped, costs the tokens that follow; two workers on loopback."""
    from titan.coordinator.bench.loss import NEXT, bench_loss  # loads MLX

    setup_logging("text", "ERROR")
    with Console(stderr=True).status("starting workers") as status:
        figures = bench_loss(model, tokens, runs, status.update)
    if as_json:
        typer.echo(json.dumps([asdict(f) for f in figures]))
        return
    table = Table(title=f"{model.name}: one of two workers is lost; ms a token, medians of {runs}")
    columns = ("worker", "steady", "at the loss", "longest", f"next {NEXT}", "local only", "next ÷ local")
    for column in (*columns, "same tokens"):
        table.add_column(column, justify="left" if column == "worker" else "right")
    for f in figures:
        times = (f.steady_ms, f.fault_ms, f.longest_ms, f.next_ms, f.alone_ms)
        same = "yes" if f.identical else "NO"
        table.add_row(f.fault, *(f"{ms:.1f}" for ms in times), f"{f.next_over_alone:.2f}", same)
    console = Console()
    console.print(table)
    console.print(
        f"the latest deadline of a call is {figures[0].limit_ms:.0f} ms (timeouts.execute); measured ones are earlier"
    )


def hints_command(
    model: Annotated[Path, typer.Option(help="Checkpoint to measure; the demo model by default.")] = DEMO_MODEL,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Cache slots a layer on each worker.")] = 8,
    prefetch: Annotated[str, typer.Option(help="Variants, comma-separated: NAME or NAME:m, as --prefetch.")] = "auto",
    tokens: Annotated[int, typer.Option(min=4, max=10_000, help="Tokens a run.")] = 32,
    runs: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each variant, in turns.")] = 6,
    reads: Annotated[CacheMode, typer.Option(help="How the workers read.")] = CacheMode.DIRECT,
    as_json: JsonOption = False,
) -> None:
    """What hints bring where two workers on loopback read experts from their own copies of the checkpoint."""
    from titan.coordinator.bench.hints import bench_hints  # loads MLX

    setup_logging("text", "ERROR")
    variants = [_variant(part.strip()) for part in prefetch.split(",")]
    with Console(stderr=True).status("starting workers") as status:
        figures = bench_hints(model, slots, variants, tokens, runs, reads, status.update)
    if as_json:
        typer.echo(json.dumps([asdict(f) for f in figures]))
        return
    table = Table(title=f"{model.name}: two workers, {slots} cache slots a layer each, {reads}; a token")
    columns = ("hints", "ms", "÷ off", "hits", "loads", "ahead", "useful", "late", "stall ms", "sent", "same tokens")
    for column in columns:
        table.add_column(column, justify="left" if column == "hints" else "right")
    for f in figures:
        counts = [f"{value:.1f}" for value in (f.loads, f.prefetched, f.useful, f.late)]
        rest = [f"{f.stall_ms:.2f}", f"{f.hints:.1f}", "yes" if f.identical else "NO"]
        table.add_row(f.variant, f"{f.token_ms:.1f}", f"{f.over_off:.2f}", f"{f.hit_rate:.3f}", *counts, *rest)
    Console().print(table)


def _variant(text: str) -> tuple[str, int | None]:
    name, colon, count = text.partition(":")
    if name not in PREFETCH or name == "off" or (colon and not (count.isdecimal() and 1 <= int(count) <= MAX_PREFETCH)):
        raise ConfigError(
            f"--prefetch is {text!r}", f"use one of {', '.join(PREFETCH[1:])}, with :1 to :{MAX_PREFETCH}"
        )
    return name, int(count) if colon else None
