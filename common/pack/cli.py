"""`titan pack SRC DST`: write packed experts with progress, or check a pack. Decides nothing about the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from titan.common.errors import ConfigError
from titan.common.pack.layout import DEFAULT_SHARD_BYTES
from titan.common.pack.selection import read_selection
from titan.common.pack.verify import verify_pack
from titan.common.pack.writer import write_pack
from titan.common.registry import open_checkpoint
from titan.common.units import format_bytes, parse_size

__all__ = ["pack", "register"]


def register(app: typer.Typer) -> None:
    """Mount `pack` on the operator's tool."""
    app.command()(pack)


def pack(
    source: Annotated[Path, typer.Argument(help="Model directory; with --verify alone, a pack.")],
    destination: Annotated[Path | None, typer.Argument(help="New directory for the pack.")] = None,
    experts: Annotated[Path | None, typer.Option(help="Plan file: pack only what a node holds.")] = None,
    node: Annotated[str | None, typer.Option(help="The node of the plan.")] = None,
    shard_size: Annotated[str, typer.Option(help="About how large a file may become.")] = format_bytes(
        DEFAULT_SHARD_BYTES
    ),
    verify: Annotated[bool, typer.Option("--verify", help="Read the pack and compare checksums.")] = False,
) -> None:
    """Rewrite a checkpoint so that each expert is one read; resumes when interrupted."""
    console = Console(highlight=False)
    if destination is None and not verify:
        raise ConfigError("titan pack needs a destination", "Name a new directory, or give --verify to check a pack")
    opened = open_checkpoint(source)
    if destination is not None:
        wanted = None if experts is None else read_selection(experts, node, opened.shape)
        with _bar(console) as bar:
            task = bar.add_task("packing", total=None)
            opened = write_pack(
                opened,
                destination,
                experts=wanted,
                shard_bytes=parse_size(shard_size),
                on_progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        manifest = opened.pack
        assert manifest is not None
        console.print(
            f"{destination}: {manifest.experts} experts in {len(manifest.shards)} files, "
            f"{format_bytes(sum(shard.nbytes for shard in opened.shards))}, "
            f"fingerprint {manifest.shape.fingerprint[:12]}",
            soft_wrap=True,
        )
    if verify:
        with _bar(console) as bar:
            task = bar.add_task("verifying", total=None)
            count = verify_pack(opened, lambda done, total: bar.update(task, completed=done, total=total))
        console.print(f"{opened.path}: {count} experts have the checksums they were packed with", soft_wrap=True)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
