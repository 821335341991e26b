"""`titan enroll`: make a worker that shows a one-time code a member of the cluster. Only wires and shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from titan.common.config.address import DEFAULT_WORKER_PORT, normalise_address
from titan.common.security.authority import DEFAULT_DAYS, load_authority
from titan.coordinator.enroll import Wish
from titan.coordinator.enroll import enroll as enroll_worker


def register(app: typer.Typer) -> None:
    """Mount `titan enroll` on `app`."""
    app.command("enroll")(enroll)


def enroll(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the worker, as it says itself; port 7077 by default.")],
    name: Annotated[
        str | None, typer.Option(help="Name in hosts.yaml; by default the one that the worker suggests.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="Another name or address it is reached by; may be given several times.")
    ] = None,
    days: Annotated[int, typer.Option(help="How long the certificate is valid.")] = DEFAULT_DAYS,
    directory: Annotated[Path, typer.Option("--dir", help="Folder of the cluster's authority.")] = Path("certs"),
    force: Annotated[bool, typer.Option("--force", help="Even though the name has a valid certificate.")] = False,
) -> None:
    """Enrol a worker: start `titan-worker --listen` there, and type the code it shows."""
    target = normalise_address(address, DEFAULT_WORKER_PORT)
    authority = load_authority(directory)
    code = typer.prompt("Code shown by the worker")  # not an option: command lines are seen by others, and kept
    enrolled = enroll_worker(target, code, authority, Wish(name, tuple(host or ()), days, force))
    who = enrolled.identity
    _say(f"Enrolled {who} for {', '.join(who.hosts)}, valid until {who.not_after:%Y-%m-%d}. Its key is there only.")
    _say(f"In hosts.yaml:\n  workers:\n    - name: {who.name}\n      addresses: ['{target}']")


def _say(sentence: str) -> None:
    Console(soft_wrap=True).print(Text(sentence))
