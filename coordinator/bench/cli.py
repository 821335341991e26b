"""`titan bench decode`, `memory` and `predict`: figures of one machine, and the cost model beside them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from titan.common.errors import ConfigError
from titan.common.units import format_bytes
from titan.deploy import DEMO_MODEL

ModelOption = Annotated[Path, typer.Option(help="Checkpoint to measure; the demo model by default.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register_bench(app: typer.Typer) -> None:
    """Mount the commands under `titan bench`."""
    app.command("decode")(decode_command)
    app.command("memory")(memory_command)
    app.command("predict")(predict_command)


def decode_command(
    model: ModelOption = DEMO_MODEL,
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens a run.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each variant.")] = 9,
    as_json: JsonOption = False,
) -> None:
    """Decode with mlx-lm, with Titan and all experts at home, and with every expert asked for; print the ratios."""
    from titan.coordinator.bench.local import bench_decode  # loads MLX

    with Console(stderr=True).status("loading") as status:
        figures = bench_decode(model, tokens, repeats, lambda done: status.update(f"run {done} of {repeats}"))
    if as_json:
        typer.echo(json.dumps(asdict(figures)))
        return
    table = Table(title=f"{figures.model}: {tokens} tokens, {repeats} interleaved runs, medians")
    for column in ("variant", "tokens/s", "÷ mlx-lm"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    table.add_row("mlx-lm", f"{figures.mlx_lm_tokens_per_s:.1f}", "1.000")
    table.add_row(
        "Titan, all experts at home", f"{figures.resident_tokens_per_s:.1f}", _ratio(figures.resident_over_mlx_lm)
    )
    table.add_row(
        "Titan, every expert asked for", f"{figures.demand_tokens_per_s:.1f}", _ratio(figures.demand_over_mlx_lm)
    )
    console = Console()
    console.print(table)
    console.print(
        f"asking costs {figures.demand_overhead_us_per_layer:.0f} µs a layer over mlx-lm; "
        f"tokens {'identical' if figures.identical else 'DIFFER'}"
    )


def memory_command(
    model: ModelOption = DEMO_MODEL,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Slots a layer (C).")] = 8,
    tokens: Annotated[int, typer.Option(min=1, max=10_000, help="Tokens to decode.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Peak memory of a coordinator with few slots, against what it may need."""
    from titan.coordinator.bench.memory import bench_memory  # loads MLX

    with Console(stderr=True).status("measuring in a process of its own"):
        figures = bench_memory(model, slots, tokens)
    if as_json:
        typer.echo(json.dumps(asdict(figures) | {"within": figures.within}))
        return
    table = Table(title=f"{figures.model}: {figures.slots_per_layer} slots a layer, {tokens} tokens", show_header=False)
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_row("interpreter with the same imports", format_bytes(figures.interpreter_bytes))
    table.add_row("everything but experts", format_bytes(figures.non_expert_bytes))
    table.add_row("slots", format_bytes(figures.slot_bytes))
    table.add_row("KV cache", format_bytes(figures.kv_bytes))
    table.add_row("allowed: their sum + 300 MiB", format_bytes(figures.allowed_bytes))
    table.add_row("peak of the process", format_bytes(figures.peak_bytes))
    table.add_row("(all experts on disk)", format_bytes(figures.checkpoint_expert_bytes))
    console = Console()
    console.print(table)
    console.print("within what is allowed" if figures.within else "MORE than allowed")


def predict_command(
    model: ModelOption = DEMO_MODEL,
    delays: Annotated[str, typer.Option(help="Delays in µs, one way, comma-separated.")] = "0,500,1000",
    tokens: Annotated[int, typer.Option(min=8, max=10_000, help="Tokens a run.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Runs of each plan.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Steps that the cost model predicts for several plans, beside steps that are decoded, with an injected delay.

    "At start" is predicted before any text is seen, "predicted" after other text was; "reads" are experts from disk in
    a step, predicted and counted.
    """
    from titan.coordinator.bench.predict import bench_predict  # loads MLX

    parts = [part.strip() for part in delays.split(",")]
    if not all(part.isdecimal() and int(part) <= 1_000_000 for part in parts) or len(parts) > 16:
        raise ConfigError(f"--delays is {delays!r}", "give up to 16 numbers of µs, separated by commas")
    with Console(stderr=True).status("measuring") as status:
        found = bench_predict(model, tuple(int(part) for part in parts), tokens, repeats, status.update)
    if as_json:
        typer.echo(json.dumps([asdict(prediction) for prediction in found]))
        return
    table = Table(title=f"{model}: two workers on this machine, {tokens} tokens, {repeats} runs, medians")
    for column in ("delay", "plan", "at start", "predicted", "measured", "error", "remote", "reads"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for p in found:
        table.add_row(
            f"{p.delay_us} µs",
            p.plan,
            f"{p.at_start_ms:.2f} ms",
            f"{p.predicted_ms:.2f} ms",
            f"{p.measured_ms:.2f} ms",
            f"{p.error:+.0%}",
            f"{p.executed_remote:.0%}",
            f"{p.predicted_reads:.1f} / {p.measured_reads:.1f}",
        )
    Console().print(table)


def _ratio(value: float) -> str:
    return f"{value:.3f}"
