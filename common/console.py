"""How a command of Titan's ends: an error becomes its sentence on standard error and its exit status."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from titan.common.errors import TitanError


def run_command(app: typer.Typer, program: str, arguments: list[str] | None = None) -> None:
    """Run a typer application as the process's main function (on `sys.argv` by default); does not return."""
    try:
        app(arguments, prog_name=program)
    except TitanError as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"{program}: {error}")
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
