"""`titan bench serve`: several requests at once, on the engine alone or over HTTP. Only wires and shows."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from titan.common.config.api_key import read_api_key
from titan.common.errors import ConfigError
from titan.deploy import DEMO_MODEL


def register_bench(app: typer.Typer) -> None:
    app.command("serve")(serve_command)


def serve_command(
    url: Annotated[str | None, typer.Option(help="A running coordinator; without it the engine alone.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="A file with an API key.")] = None,
    model: Annotated[Path, typer.Option(help="Checkpoint for the engine alone.")] = DEMO_MODEL,
    concurrency: Annotated[str, typer.Option(help="Requests at once, one after another.")] = "1,2,4,8",
    tokens: Annotated[int, typer.Option(min=4, max=10_000, help="Tokens an answer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Runs, or rounds over HTTP.")] = 5,
    prompt: Annotated[str, typer.Option(help="Prompt over HTTP.")] = "SCENE I. A street.",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokens/s, time to first token and between tokens; without --url, beside mlx-lm's batch generator."""
    try:
        batches = [int(part) for part in concurrency.split(",")]
    except ValueError:
        batches = []
    if not batches or not all(1 <= batch <= 64 for batch in batches):
        raise ConfigError(f"--concurrency is {concurrency!r}", "give numbers in 1..64, as in 1,2,4,8")
    rows: list[dict[str, Any]]
    if url is not None:
        from titan.coordinator.bench.serve_http import bench_http
        from titan.coordinator.client import base_of

        key = None if key_file is None else read_api_key(key_file)
        rows = [asdict(f) for f in asyncio.run(bench_http(base_of(url), key, batches, tokens, repeats, prompt))]
    else:
        from titan.coordinator.bench.serve import bench_engine  # loads MLX

        with Console(stderr=True).status("loading") as status:
            rows = [asdict(f) for f in bench_engine(model, batches, tokens, repeats, status.update).batches]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(title=url or f"{model}: the engine alone")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
