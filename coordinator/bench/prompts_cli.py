"""`titan bench prompts`: prompts' layers with too few slots, as a table or JSON. Measures nothing itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from titan.common.errors import ConfigError
from titan.common.units import parse_duration
from titan.deploy import DEMO_MODEL

if TYPE_CHECKING:
    from titan.coordinator.bench.prompts import PromptFigures

MAX_ROWS = 65_536
MAX_NUMBERS = 16
MAX_DELAY_S = 1.0


def register_bench(app: typer.Typer) -> None:
    """Mount the command under `titan bench`."""
    app.command("prompts")(prompts_command)


def prompts_command(
    model: Annotated[Path, typer.Option(help="Checkpoint to measure; the demo model by default.")] = DEMO_MODEL,
    slots: Annotated[str, typer.Option(help="Slots a layer (C), several with commas.")] = "8,16",
    rows: Annotated[str, typer.Option(help="Tokens of the prompt, several with commas.")] = "32,128",
    layers: Annotated[int, typer.Option(min=1, max=1024, help="Layers to run, at most the model's.")] = 4,
    reads: Annotated[str, typer.Option(help="page-cache, direct or drop.")] = "direct",
    read_delay: Annotated[str, typer.Option(help="Let an expert's read take longer, e.g. 20ms: a slower disk.")] = "",
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each way, in turns.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prompts' MoE layers with too few slots, against their compute alone and their reads alone, in turns."""
    from titan.common.registry import open_checkpoint
    from titan.common.store import CacheMode
    from titan.coordinator.bench.prompts import bench_prompts  # loads MLX

    checkpoint = open_checkpoint(model)
    if reads not in list(CacheMode):
        raise ConfigError(f"there is no way to read {reads!r}", f"Use one of {', '.join(CacheMode)}")
    capacities = _numbers("--slots", slots, checkpoint.shape.num_experts)
    lengths = _numbers("--rows", rows, MAX_ROWS)
    delay_s = parse_duration(read_delay, allow_zero=True) if read_delay else 0.0
    if delay_s > MAX_DELAY_S:
        raise ConfigError(f"--read-delay is {read_delay!r}", "Give at most 1s, e.g. 20ms")
    found: list[PromptFigures] = []
    with Console(stderr=True).status("measuring") as status:
        for capacity in capacities:
            for length in lengths:
                name = f"C = {capacity}, {length} tokens"
                figures = bench_prompts(
                    checkpoint,
                    capacity,
                    length,
                    layers,
                    cache=CacheMode(reads),
                    read_delay_s=delay_s,
                    repeats=repeats,
                    on_repeat=lambda done, name=name: status.update(f"{name}: run {done + 1} of {repeats}"),
                )
                found.append(figures)
    if as_json:
        typer.echo(json.dumps([asdict(figures) for figures in found]))
        return
    _show(Console(), found)


def _numbers(option: str, text: str, most: int) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_NUMBERS or not all(p.isdecimal() and len(p) < 10 and 1 <= int(p) <= most for p in parts):
        raise ConfigError(f"{option} is {text[:80]!r}", f"Give up to {MAX_NUMBERS} numbers in 1..{most}, with commas")
    return [int(part) for part in parts]


def _show(console: Console, rows: Iterable[PromptFigures]) -> None:
    table = Table(title="A layer of a prompt; ÷: over the longer of compute and reads alone (medians)")
    for column in ("C", "tokens", "ms", "compute", "reads", "÷", "stall", "loads"):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            str(r.slots),
            str(r.rows),
            *(f"{ms:.1f}" for ms in (r.layer_ms, r.compute_ms, r.reads_ms)),
            f"{r.over_bound:.2f}" if r.identical else f"{r.over_bound:.2f} OUTPUTS DIFFER",
            f"{r.stall_ms:.1f}",
            f"{r.loads:.1f}",
        )
    console.print(table)
