"""`titan top`: a live table of a coordinator: engine, workers, experts, hit rates, tokens/s."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from titan.common.units import format_bytes
from titan.coordinator.client import connect, get

GENERATED = "titan_generated_tokens_total "


def register(app: typer.Typer) -> None:
    app.command("top")(top)


def top(
    url: Annotated[str, typer.Option(help="The coordinator's HTTP address.")] = "http://127.0.0.1:8080",
    key_file: Annotated[Path | None, typer.Option(help="A file with an API key.")] = None,
    every: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON once.")] = False,
) -> None:
    """Show what the cluster does."""
    console = Console()
    with connect(url, key_file) as client:
        if as_json:
            typer.echo(json.dumps(get(client, "/v1/titan/cluster")))
            return
        before: dict[str, Any] | None = None
        with Live(console=console, auto_refresh=False) as live:
            while True:
                now = _look(client)
                live.update(_shown(now, before), refresh=True)
                if once:
                    return
                before = now
                try:
                    time.sleep(every)
                except KeyboardInterrupt:
                    return


def _look(client: Any) -> dict[str, Any]:
    state = get(client, "/v1/titan/cluster")
    lines = client.get("/metrics").text.splitlines()
    tokens = next((float(line.split()[-1]) for line in lines if line.startswith(GENERATED)), 0.0)
    return state | {"at": time.monotonic(), "tokens": tokens}


def _shown(now: dict[str, Any], before: dict[str, Any] | None) -> Group:
    engine = now["engine"]
    seconds = now["at"] - before["at"] if before else 0.0
    rate = (now["tokens"] - before["tokens"]) / seconds if before and seconds else 0.0
    head = Table(title=f"{now['model']['name'] if 'model' in now else ''} — {engine['state']}")
    for column in ("tokens/s", "decoding", "prefilling", "queued", "KV", "completed", "failed", "cancelled"):
        head.add_column(column, justify="right")
    share = engine["kv_tokens"] / engine["kv_budget_tokens"] if engine["kv_budget_tokens"] else 0.0
    counts = [str(engine[name]) for name in ("decoding", "prefilling", "queued")]
    ends = [str(engine[name]) for name in ("completed", "failed", "cancelled")]
    head.add_row(f"{rate:.1f}", *counts, f"{share:.0%}", *ends)
    return Group(head, _nodes(now, before), _tiers(now, before), _layer(now))


def _nodes(now: dict[str, Any], before: dict[str, Any] | None) -> Table:
    table = Table()
    for column in ("node", "state", "breaker", "address", "experts", "memory", "pairs", "share", "sent", "received"):
        table.add_column(column, justify="left" if column in ("node", "state", "breaker", "address") else "right")
    executed = now.get("executed") or {"local": 0, "ssd": 0, "remote": {}}
    earlier = (before or {}).get("executed") or {"local": 0, "ssd": 0, "remote": {}}
    done = {"": executed["local"] - earlier["local"], "ssd": executed["ssd"] - earlier["ssd"]}
    done |= {name: pairs - earlier["remote"].get(name, 0) for name, pairs in executed["remote"].items()}
    total = sum(done.values()) or 1
    workers = {worker["name"]: worker for worker in now.get("workers", [])}
    for number, node in enumerate((now.get("plan") or {"nodes": []})["nodes"]):
        pairs = done.get("" if number == 0 else node["name"], 0)
        executed_here = [str(pairs), f"{pairs / total:.0%}"]
        worker = workers.get(node["name"])
        if worker is None:
            memory = now.get("memory")
            used = _of(memory["slots_bytes"], memory["experts_budget_bytes"]) if memory else ""
            table.add_row(node["name"], "here", "", "", str(node["experts"]), used, *executed_here, "", "")
            continue
        state = f"{worker['state']} {worker['reason'][:40]}".strip()
        offered = worker["memory_budget_bytes"]
        traffic = worker["traffic"] or {"sent_bytes": 0, "received_bytes": 0}
        table.add_row(
            *(node["name"], state, worker["breaker"], worker["address"], str(node["experts"])),
            _of(worker["assigned_bytes"], offered),
            *executed_here,
            *(format_bytes(traffic[f"{way}_bytes"]) for way in ("sent", "received")),
        )
    table.add_row("SSD", "", "", "", "", "", str(done["ssd"]), f"{done['ssd'] / total:.0%}", "", "")
    return table


def _of(used: int, offered: int | None) -> str:
    return format_bytes(used) if offered is None else f"{format_bytes(used)} of {format_bytes(offered)}"


def _layer(now: dict[str, Any]) -> Table:
    """The mean layer, in the forward passes that were measured."""
    layers = now.get("layers", [])
    parts = ("attention", "local", "wire", "wait", "stall")
    passes = max((layer["passes"] for layer in layers), default=0)
    table = Table(title=f"a layer, mean of {passes} measured passes", title_justify="left")
    for part in parts:
        table.add_column(part, justify="right")
    if layers:
        table.add_row(*(f"{sum(layer[f'{part}_us'] for layer in layers) / len(layers):.0f} µs" for part in parts))
    return table


def _tiers(now: dict[str, Any], before: dict[str, Any] | None) -> Table:
    table = Table()
    columns = ("slot hits", "expert loads", "read from disk", "read ahead", "useful", "in flight when needed")
    for column in (*columns, "fallbacks", "late answers", "prompt tokens known"):
        table.add_column(column, justify="right")
    slots, earlier = now.get("slots", {"hits": 0, "misses": 0, "loads": 0}), (before or {}).get("slots", {})
    hits, misses = slots["hits"] - earlier.get("hits", 0), slots["misses"] - earlier.get("misses", 0)
    executed = now.get("executed") or {"fallbacks": 0, "late": 0}
    cache = now.get("prompt_cache") or {"prompt_tokens": 0, "reused_tokens": 0}
    known = cache["reused_tokens"] / cache["prompt_tokens"] if cache["prompt_tokens"] else 0.0
    table.add_row(
        f"{hits / (hits + misses):.0%}" if hits + misses else "—",
        str(slots["loads"] - earlier.get("loads", 0)),
        format_bytes(now.get("store", {"bytes": 0})["bytes"]),
        *(str(slots.get(name, 0)) for name in ("prefetched", "useful", "prefetched_late")),
        str(executed["fallbacks"]),
        str(executed["late"]),
        f"{known:.0%}",
    )
    return table
