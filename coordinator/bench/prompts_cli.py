"""`titan bench prompts`: how long prompts' layers take with too few slots, as a table or JSON. Measures nothing itself."""

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
from titan.deploy import DEMO_MODEL

if TYPE_CHECKING:
    from titan.coordinator.bench.prompts import PromptFigures

MAX_ROWS = 65_536
MAX_NUMBERS = 16


def register_bench(app: typer.Typer) -> None:
    """Mount the command under `titan bench`."""
    app.command("prompts")(prompts_command)


def prompts_command(
    model: Annotated[Path, typer.Option(help="Checkpoint to measure; the demo model by default.")] = DEMO_MODEL,
    slots: Annotated[str, typer.Option(help="Slots a layer (C), several with commas.")] = "8,16",
    rows: Annotated[str, typer.Option(help="Tokens of the prompt, several with commas.")] = "32,128",
    layers: Annotated[int, typer.Option(min=1, max=1024, help="Layers to run, at most the model's.")] = 4,
    reads: Annotated[str, typer.Option(help="page-cache, direct or drop.")] = "direct",
    read_rate: Annotated[
        str, typer.Option(help="Slow the disk down to this, e.g. 500MB/s, by waiting without the CPU.")
    ] = "",
    section: Annotated[int, typer.Option(min=0, max=4096, help="Experts read past the slots at a time; 0: all.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each way, in turns.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prompts' MoE layers with too few slots, against their compute alone and their reads alone, in turns."""
    from titan.common.registry import open_checkpoint
    from titan.common.store import CacheMode
    from titan.coordinator.bench.prompts import bench_prompts  # loads MLX
    from titan.coordinator.bench.slow_disk import parse_rate

    checkpoint = open_checkpoint(model)
    if reads not in list(CacheMode):
        raise ConfigError(f"there is no way to read {reads!r}", f"Use one of {', '.join(CacheMode)}")
    capacities = _numbers("--slots", slots, checkpoint.shape.num_experts)
    lengths = _numbers("--rows", rows, MAX_ROWS)
    rate = parse_rate(read_rate)
    found: list[PromptFigures] = []
    with Console(stderr=True).status("measuring") as status:
        for capacity in capacities:
            for length in lengths:
                name = f"C = {capacity}, {length} tokens"
                found += bench_prompts(
                    checkpoint,
                    capacity,
                    length,
                    layers,
                    cache=CacheMode(reads),
                    section=section,
                    bytes_per_s=rate,
                    repeats=repeats,
                    on_repeat=lambda done, name=name: status.update(f"{name}: run {done + 1} of {repeats}"),
                )
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
    for column in ("C", "section", "tokens", "ms", "compute", "reads", "÷", "stall", "loads"):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            str(r.slots),
            str(r.section or "–"),
            str(r.rows),
            *(f"{ms:.1f}" for ms in (r.layer_ms, r.compute_ms, r.reads_ms)),
            f"{r.over_bound:.2f}" if r.identical else f"{r.over_bound:.2f} OUTPUTS DIFFER",
            f"{r.stall_ms:.1f}",
            f"{r.loads:.1f}",
        )
    console.print(table)
