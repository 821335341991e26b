"""`titan demo`: see Titan work on one machine within seconds."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from titan.common.errors import ConfigError
from titan.common.log import setup_logging
from titan.deploy import DEMO_MODEL

SCENE = "SCENE II. A street in Verona.\n\n[Enter ROMEO and MERCUTIO.]\n\nROMEO.\n"
TURN = "Good morrow, sir. What have you there?"


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    prompt: Annotated[str | None, typer.Option(help="Text to continue; by default the opening of a scene.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Take the prompt as a chat turn.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, max=900, help="Most tokens of the answer.")] = 96,
    kill_worker_after: Annotated[
        int | None, typer.Option(min=1, help="End one worker process after that many tokens.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Keep serving HTTP until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: Annotated[Path, typer.Option(help="Checkpoint; the bundled one by default.")] = DEMO_MODEL,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show log lines.")] = False,
) -> None:
    """A cluster of two worker processes and a coordinator on this machine answers, and mlx-lm checks it."""
    from titan.coordinator.demo.cluster import LoopbackCluster  # these load MLX
    from titan.coordinator.demo.run import run_demo

    setup_logging("text", "INFO" if verbose else "ERROR")
    if serve and (as_json or kill_worker_after is not None):
        raise ConfigError("--serve goes with neither --json nor --kill-worker-after", "leave one out")
    text = prompt if prompt is not None else TURN if chat else SCENE
    if not text.strip() or len(text) > 100_000:
        raise ConfigError("the prompt is empty or longer than 100,000 characters", "give another --prompt")
    signal.signal(signal.SIGTERM, _interrupt)  # so that the `with` blocks below run
    console = Console(stderr=True, highlight=False)
    started = time.monotonic()
    first: list[float] = []
    out = None if as_json else sys.stdout

    def show(piece: str) -> None:
        if not first:
            first.append(time.monotonic() - started)
            status.stop()
            if out is not None and not chat:
                out.write(text)
        if out is not None:
            out.write(piece)
            out.flush()

    status = console.status("starting two worker processes")
    with status, LoopbackCluster(model) as loopback:
        if serve:
            from titan.coordinator.demo.serve import serve_demo

            status.stop()
            serve_demo(loopback, console)
            return
        report = asyncio.run(
            run_demo(
                loopback,
                text,
                chat=chat,
                max_tokens=max_tokens,
                kill_after=kill_worker_after,
                on_phase=lambda phase: status.update(phase),
                on_text=show,
                on_kill=lambda name: console.print(f"\n[bold red]{name} was killed[/]", end="") if out else None,
            )
        )
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        typer.echo("\n")
        _print(report, first[0] if first else 0.0)
    if not report.identical:
        raise typer.Exit(1)


def _print(report: object, first_token_s: float) -> None:
    from titan.coordinator.demo.run import DemoReport

    assert isinstance(report, DemoReport)
    console = Console(highlight=False)
    total = sum(report.executed.values()) or 1
    table = Table(title="who executed the experts", title_justify="left")
    for column in ("where", "experts held", "(token, expert) pairs", "share"):
        table.add_column(column, justify="left" if column == "where" else "right")
    table.add_row(
        "coordinator, from memory", "", str(report.executed["local"]), f"{report.executed['local'] / total:.0%}"
    )
    for worker in report.workers:
        place = f"{worker.name} at {worker.address}" + (" (killed)" if worker.killed else "")
        table.add_row(place, str(worker.experts), str(worker.executed), f"{worker.executed / total:.0%}")
    table.add_row("coordinator, from its SSD", "", str(report.executed["ssd"]), f"{report.executed['ssd'] / total:.0%}")
    console.print(table)
    console.print(
        f"{len(report.tokens)} tokens at {report.tokens_per_s:.1f} tokens/s; "
        f"first token {first_token_s:.1f} s after the command, {report.first_token_s * 1e3:.0f} ms after the request"
    )
    if report.killed:
        console.print(
            f"{report.killed} was killed on the way: {report.fallbacks} pairs under way were executed here instead"
        )
    if report.identical:
        console.print("[bold green]the tokens are the same as mlx-lm's[/]")
    else:
        differs = next(
            (i for i, (a, b) in enumerate(zip(report.tokens, report.reference_tokens, strict=False)) if a != b), None
        )
        console.print(f"[bold red]the tokens DIFFER from mlx-lm's, first at {differs}[/]")


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
