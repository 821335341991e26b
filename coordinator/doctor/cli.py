"""`titan doctor`: look at this machine and at every worker, and print what to mend. Only wires and shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titan.common.config.hosts import HostsConfig, load_hosts
from titan.common.errors import ConfigError, SecurityError
from titan.common.security.credentials import load_credentials, load_credentials_dir
from titan.common.security.identity import Role
from titan.coordinator.doctor import machine
from titan.coordinator.doctor.certificates import check_certificates
from titan.coordinator.doctor.finding import Finding, failed, worst
from titan.coordinator.doctor.workers import check_workers

WORKER_CERTS = Path("~/.titan/certs")
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def register(app: typer.Typer) -> None:
    """Mount `titan doctor` on `app`."""
    app.command("doctor")(doctor)


def doctor(
    hosts: Annotated[Path, typer.Option(help="The cluster, on the machine that coordinates it.")] = Path("hosts.yaml"),
    certs: Annotated[Path, typer.Option(help="A worker's certificates, on the machine that is one.")] = WORKER_CERTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check certificates, clocks, versions, ports, network, memory, disk and sleep, and say how to mend them.

    Without hosts.yaml, only this machine is looked at: that is of use on workers too. Exit status 1 when a check fails.
    """
    findings = list(examine(hosts, certs.expanduser()))
    if as_json:
        report = {"ok": worst(findings) != "fail", "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(Console(), findings)
    raise typer.Exit(1 if worst(findings) == "fail" else 0)


def examine(hosts: Path, certs: Path) -> Iterator[Finding]:
    """Everything, in the order in which it is shown. Raises nothing that a check can meet."""
    config: HostsConfig | None = None
    if hosts.exists():
        try:
            config = load_hosts(hosts)
            count = len(config.workers)
            yield Finding("hosts.yaml", str(hosts), "ok", f"valid, {count} worker{'s' * (count != 1)}")
        except ConfigError as error:
            yield failed("hosts.yaml", str(hosts), error)
    device, kind = machine.check_device()
    yield device
    yield machine.check_memory(config.coordinator.memory if config else None)
    yield machine.check_open_files()
    yield machine.check_sleep()
    if config is not None:
        yield machine.check_disk(config.model)
        yield machine.check_port(config.coordinator.listen)
        yield from _cluster(config, kind)
    elif certs.is_dir():
        yield from check_certificates(lambda: load_credentials_dir(certs, role=Role.WORKER), certs, Role.WORKER)
    elif not hosts.exists():
        text = "does not exist: only this machine was looked at"
        mend = "Run it where hosts.yaml is, or name the file with --hosts"
        yield Finding("hosts.yaml", str(hosts), "warn", text, mend)


def _cluster(config: HostsConfig, device: str) -> Iterator[Finding]:
    if not config.workers:
        yield Finding("workers", "hosts.yaml", "ok", "none: this machine runs every expert itself")
        return
    tls = config.tls
    yield from check_certificates(
        lambda: load_credentials(tls.ca, tls.cert, tls.key), tls.cert.parent, Role.COORDINATOR
    )
    try:
        credentials = load_credentials(tls.ca, tls.cert, tls.key)
    except SecurityError:
        return  # said above; nobody can be asked without
    yield from check_workers(config, credentials, device)


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table()
    for title in ("", "check", "of", "found"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, Text(finding.check), Text(finding.subject), Text(finding.text))
    console.print(table)
    for finding in findings:
        if finding.mend:
            console.print(Text(f"{finding.check}, {finding.subject}: {finding.mend}."), soft_wrap=True)
    count = sum(finding.level == "fail" for finding in findings)
    warnings = sum(finding.level == "warn" for finding in findings)
    console.print(Text(f"{count} failed, {warnings} to look at, {len(findings) - count - warnings} well."))
