"""`titan hosts check`: is hosts.yaml right, and who answers at each address in it? Only wires and shows."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titan.common.config.hosts import HostsConfig, load_hosts
from titan.common.config.probe import Prober, ProbeResult
from titan.common.config.probe_status import status_prober
from titan.common.errors import TitanError
from titan.common.security.credentials import Credentials, load_credentials
from titan.common.security.identity import Role, require_role

PARALLEL_PROBES = 16


def register(app: typer.Typer, *, prober: Prober | None = None) -> None:
    """Mount `titan hosts` on `app`. `prober` asks one address; by default, for the worker's Status."""
    hosts = typer.Typer(help="The machines of the cluster.", no_args_is_help=True)

    @hosts.callback()
    def _group() -> None:
        """Keeps `check` a sub-command while it is the only one."""

    @hosts.command("check")
    def check(
        path: Annotated[Path, typer.Argument(help="The file to check.")] = Path("hosts.yaml"),
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Check hosts.yaml and the certificate, then try each address.

        Exit status: 0 when every address answers as it should, 1 when one does not, 2 when the file is wrong.
        """
        try:
            config = load_hosts(path)
            credentials = load_credentials(config.tls.ca, config.tls.cert, config.tls.key)
            require_role(credentials.identity, Role.COORDINATOR)
        except TitanError as error:
            if not as_json:
                raise
            typer.echo(json.dumps({"ok": False, "file": str(path), "error": _error_json(error), "addresses": []}))
            raise typer.Exit(error.exit_status) from error
        times = config.timeouts
        results = check_hosts(config, credentials, prober or status_prober(times.connect, times.probe))
        ok = all(result.ok for result in results)
        if as_json:
            report = {"ok": ok, "file": str(path), "error": None, "addresses": [_result_json(r) for r in results]}
            typer.echo(json.dumps(report, indent=2))
        else:
            _show(Console(), path, credentials, results)
        raise typer.Exit(0 if ok else 1)

    app.add_typer(hosts, name="hosts")


def check_hosts(config: HostsConfig, credentials: Credentials, prober: Prober) -> list[ProbeResult]:
    """Probe all addresses side by side; results in the file's order."""
    pairs = [(worker, address) for worker in config.workers for address in worker.addresses]
    if not pairs:
        return []
    with ThreadPoolExecutor(min(PARALLEL_PROBES, len(pairs)), thread_name_prefix="probe") as pool:
        return list(pool.map(lambda pair: prober(pair[0], pair[1], credentials), pairs))


def _error_json(error: TitanError) -> dict[str, str]:
    return {"code": error.code, "cause": error.cause, "mend": error.mend}


def _result_json(result: ProbeResult) -> dict[str, object]:
    peer = result.peer
    return {
        "worker": result.worker,
        "address": result.address,
        "status": result.status,
        "cause": result.cause,
        "mend": result.mend,
        "milliseconds": round(result.seconds * 1e3, 3),
        "peer": peer
        and {
            "name": peer.name,
            "role": str(peer.role),
            "cluster": peer.cluster,
            "expires": peer.not_after.isoformat(),
            "hosts": list(peer.hosts),
        },
        "details": result.details,
    }


def _show(console: Console, path: Path, credentials: Credentials, results: list[ProbeResult]) -> None:
    own = credentials.identity
    console.print(Text(f"{path} is valid; this machine is {own}, certificate until {own.not_after:%Y-%m-%d}"))
    if not results:
        console.print("No workers: the coordinator runs every expert itself.")
        return
    table = Table()
    for title in ("worker", "address", "status", "who answered", "certificate until", "ms"):
        table.add_column(title, justify="right" if title == "ms" else "left", overflow="fold")
    for r in results:
        status = Text(r.status.replace("_", " "), style="green" if r.ok else "red")
        expiry = f"{r.peer.not_after:%Y-%m-%d}" if r.peer else ""
        who = str(r.peer) if r.peer else ""
        table.add_row(Text(r.worker), Text(r.address), status, Text(who), expiry, f"{r.seconds * 1e3:.1f}")
    console.print(table)
    for r in results:
        if not r.ok:
            console.print(Text(f"{r.worker}: {r.cause}. {r.mend}."))
        for key, value in r.details.items():
            console.print(Text(f"{r.worker} {r.address}: {key} {value}"))
