"""`titan keys`: named API keys, kept as digests. Only wires."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    keys = typer.Typer(help="API keys of the coordinator.", no_args_is_help=True)
    keys.command("add")(add)
    app.add_typer(keys, name="keys")


def add(
    name: Annotated[str, typer.Argument(help="Whose key it is; shown in logs.")],
    file: Annotated[Path, typer.Option(help="The file that coordinator.api_key_file names.")] = Path("api-keys"),
    operator: Annotated[bool, typer.Option("--operator", help="The key may drain and resume.")] = False,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, max=999_999, help="Refuse more than these.")] = None,
) -> None:
    """Make a key, append its digest to the file, and print the key: this once and nowhere else."""
    from titan.coordinator.api.keyfile import add_key  # loads the API

    typer.echo(add_key(file, name, operator=operator, requests_per_minute=requests_per_minute))
