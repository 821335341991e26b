"""`titan download ORG/NAME`: say what will be fetched, fetch it with progress, say what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from titan.common.errors import MemoryBudgetError
from titan.common.platform import memory_budget_bytes
from titan.common.units import format_bytes

__all__ = ["download", "register"]


def register(app: typer.Typer) -> None:
    """Mount `download` on the operator's tool."""
    app.command()(download)


def download(
    name: Annotated[str, typer.Argument(help="Repository on the hub, org/name.")],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    to: Annotated[Path | None, typer.Option(help="Folder for the files; by default the Hugging Face cache.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="URL of another hub.")] = None,
    look_only: Annotated[bool, typer.Option("--look", help="Only say whether it can run here; fetch nothing.")] = False,
) -> None:
    """Get a checkpoint from the Hugging Face hub, if Titan can run it and the disk can hold it."""
    from titan.common.hub.download import Source, look
    from titan.common.hub.download import download as fetch

    console = Console(highlight=False)
    source = Source(name, revision, None if to is None else to.expanduser(), endpoint)
    found = look(source)
    console.print(
        f"{name}: {found.family}, {found.files} files, {format_bytes(found.total_bytes)}, "
        f"{format_bytes(found.absent_bytes)} of it not here yet. {_fit(found.total_bytes)}",
        soft_wrap=True,
    )
    if look_only:
        return
    checkpoint = fetch(source)
    shape = checkpoint.shape
    console.print(
        f"{checkpoint.path}: {len(shape.layers)} layers of {shape.num_experts} experts, top-{shape.top_k}, "
        f"fingerprint {shape.fingerprint[:12]}. In hosts.yaml: `model: {name if to is None else checkpoint.path}`",
        soft_wrap=True,
    )


def _fit(total_bytes: int) -> str:
    """In words, whether the model fits this machine's memory."""
    try:
        budget = memory_budget_bytes()
    except MemoryBudgetError:
        return ""
    if total_bytes <= budget:
        return f"It fits this machine's memory ({format_bytes(budget)} to spare): mlx-lm alone would run it too."
    return (
        f"This machine can spare {format_bytes(budget)}: the rest of it goes to workers' memory, or is read from this "
        "machine's disk. `titan plan` says what that costs."
    )
