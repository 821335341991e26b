"""`titan stats`: what a running coordinator's SSD tier does, layer by layer, and its workers. For 100 columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from titan.common.units import format_bytes, format_seconds
from titan.coordinator.client import connect, get

NOTHING = (
    "Nothing to show yet: no layer has looked for an expert in its slots. Either every layer is wholly at home, or "
    "workers hold what was asked for, or no token has been generated."
)


def register(app: typer.Typer) -> None:
    app.command("stats")(stats)


def stats(
    url: Annotated[str, typer.Option(help="The coordinator's HTTP address.")] = "http://127.0.0.1:8080",
    key_file: Annotated[Path | None, typer.Option(help="A file with an API key.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hit rates, loads, stalls, prefetch and disk of a running coordinator, per layer."""
    with connect(url, key_file) as client:
        found = get(client, "/v1/titan/stats")
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    asked = [layer for layer in found["layers"] if layer["hits"] + layer["misses"]]
    if asked:
        console.print(_layers(found, asked))
        console.print(_disk(found["disk"]))
    else:
        console.print(NOTHING)
    if found["workers"]:
        console.print(_workers(found["workers"]))


def _layers(found: dict[str, Any], asked: list[dict[str, Any]]) -> Table:
    quiet = len(found["layers"]) - len(asked)
    caption = f"{quiet} layers looked for nothing: wholly at home, or held by workers" if quiet else None
    title = f"{found['model']} · policy {found['policy']} · prefetch {found['prefetch']}"
    table = Table(title=title, caption=caption)
    for column in ("layer", "slots", "hits", "loads", "read", "stall", "ahead", "useful", "recall", "late"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in asked:
        table.add_row(str(layer["layer"]), f"{layer['slots']} ({layer['pinned']} pinned)", *_counts(layer))
    table.add_section()
    table.add_row("all", str(sum(layer["slots"] for layer in asked)), *_counts(found["total"]))
    return table


def _counts(row: dict[str, Any]) -> list[str]:
    return [
        _percent(row["hit_rate"]),
        str(row["loads"]),
        format_bytes(row["bytes"]),
        format_seconds(row["stall_s"]),
        str(row["prefetched"]),
        _percent(row["precision"]),
        _percent(row["recall"]),
        str(row["late"]),
    ]


def _disk(disk: dict[str, Any]) -> str:
    parts = [f"disk: {format_bytes(disk['bytes'])} in {disk['experts']} experts"]
    if disk["bytes_per_s"] is not None:
        parts.append(f"{_rate(disk['bytes_per_s'])} a reader")
    if disk["bytes_per_s"] is not None and disk["device_bytes_per_s"]:
        share = disk["bytes_per_s"] / disk["device_bytes_per_s"]
        cold, cached = _rate(disk["device_bytes_per_s"]), _rate(disk["page_cache_bytes_per_s"] or 0.0)
        parts.append(f"{share:.2f} × the device's own (cold {cold}, page cache {cached})")
    else:
        parts.append("the device was not measured (--quick-plan or --plan)")
    if faults := disk["retries"] + disk["other_copy"] + disk["mismatches"]:
        parts.append(f"{faults} reads needed a retry or another copy")
    return "; ".join(parts)


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table()
    caches = ("cache hits", "loads", "stall", "hints") if any(worker["cache"] is not None for worker in workers) else ()
    for column in ("worker", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("pairs", "share", "reply", "experts", *caches):
        table.add_column(column, justify="right")
    total = sum(worker["pairs"] for worker in workers) or 1
    for worker in workers:
        cache = worker["cache"]
        own = ["—"] * len(caches)
        if cache is not None:
            hints = f"{cache['hints']} ({cache['hints_unused']} unused)"
            own = [_percent(cache["hit_rate"]), str(cache["loads"]), format_seconds(cache["stall_s"]), hints]
        table.add_row(
            worker["name"],
            worker["state"],
            str(worker["pairs"]),
            f"{worker['pairs'] / total:.0%}",
            "—" if worker["reply_s"] is None else format_seconds(worker["reply_s"]),
            "—" if worker["expert_bytes"] is None else format_bytes(worker["expert_bytes"]),
            *own,
        )
    return table


def _percent(share: float | None) -> str:
    return "—" if share is None else f"{share:.1%}"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s"
