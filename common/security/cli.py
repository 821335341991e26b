"""`titan certs`: make the cluster's authority, issue certificates, show them. Only wires and shows.

`revoke` and `renew`, which talk to workers, are in trust_cli.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titan.common.errors import CertificateMissing, SecurityError
from titan.common.security import trust_cli
from titan.common.security.authority import DEFAULT_DAYS, init_authority, issue, load_authority
from titan.common.security.files import read_bounded
from titan.common.security.identity import Role, parse_identity, read_certificate
from titan.common.security.renewal import SOON
from titan.common.security.revocation import LIST_FILE, load_revocations

DIR = typer.Option("--dir", help="Folder of the authority and of the new files.")
FORCE = typer.Option("--force", help="Replace what is there.")


@dataclass(frozen=True, slots=True)
class Shown:
    """One certificate as `show` lists it; `state` is "ok", "soon", "expired", "early", "revoked" or "unreadable"."""

    path: Path
    subject: str
    role: str
    hosts: tuple[str, ...]
    not_after: datetime | None
    state: str
    has_key: bool


def register(app: typer.Typer) -> None:
    """Mount `titan certs` on `app`."""
    certs = typer.Typer(help="The cluster's certificates.", no_args_is_help=True)
    certs.command("init")(init)
    certs.command("issue")(issue_certificate)
    certs.command("show")(show)
    trust_cli.register(certs)
    app.add_typer(certs, name="certs")


def init(directory: Annotated[Path, DIR] = Path("certs"), force: Annotated[bool, FORCE] = False) -> None:
    """Make a new cluster authority (EC P-256, ten years)."""
    authority = init_authority(directory, force=force)
    _say(f"Cluster {authority.cluster}: wrote {directory / 'ca.pem'} and {directory / 'ca.key'}.")
    _say(f"Keep {directory / 'ca.key'} on this machine: who has it can join the cluster.")
    _say("Next: `titan certs issue coordinator`, and `titan certs issue NAME --host HOST` for each worker.")


def issue_certificate(
    name: Annotated[str, typer.Argument(help="Name as in hosts.yaml: a-z, 0-9 and -.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or IP address it is reached by; may be given several times.")
    ] = None,
    role: Annotated[
        Role | None, typer.Option(help="Default: coordinator for the name `coordinator`, else worker.")
    ] = None,
    days: Annotated[int, typer.Option(help="How long it is valid.")] = DEFAULT_DAYS,
    directory: Annotated[Path, DIR] = Path("certs"),
    force: Annotated[bool, FORCE] = False,
) -> None:
    """Make a key and a certificate signed by the authority."""
    chosen = role or (Role.COORDINATOR if name == "coordinator" else Role.WORKER)
    authority = load_authority(directory)
    issued = issue(authority, name, role=chosen, hosts=host or [], days=days, force=force)
    who = issued.identity
    hosts = f" for {', '.join(who.hosts)}" if who.hosts else ""
    _say(f"Issued {who}{hosts}, valid until {who.not_after:%Y-%m-%d}: {issued.cert_path} and {issued.key_path}.")
    if chosen is Role.WORKER:
        _say(
            f"Copy ca.pem, {issued.cert_path.name} and {issued.key_path.name} to the worker, "
            "into the folder given to `titan-worker --certs`."
        )


def show(
    path: Annotated[Path, typer.Argument(help="A certificate, or a folder of them.")] = Path("certs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List certificates: who, role, hosts, expiry."""
    rows = list_certificates(path)
    if as_json:
        typer.echo(json.dumps([_row_json(row) for row in rows], indent=2))
        return
    table = Table()
    for title in ("certificate", "subject", "role", "hosts", "valid until", "key"):
        table.add_column(title, overflow="fold")
    colours = {"ok": "", "soon": "yellow", "early": "yellow"}
    for row in rows:
        until = f"{row.not_after:%Y-%m-%d}" if row.not_after else ""
        note = {
            "soon": " (soon)",
            "expired": " EXPIRED",
            "early": " (not yet valid)",
            "revoked": " REVOKED",
            "unreadable": "unreadable",
        }
        expiry = Text(until + note.get(row.state, ""), style=colours.get(row.state, "red"))
        key = "yes" if row.has_key else "no"
        table.add_row(Text(row.path.name), Text(row.subject), row.role, Text("\n".join(row.hosts)), expiry, key)
    Console().print(table)
    for row in rows:
        if row.state in ("soon", "expired"):
            verb = "expires soon" if row.state == "soon" else "has expired"
            _say(f"{row.subject} {verb}: renew it with {_renewal(row)}.")


def list_certificates(path: Path, *, now: datetime | None = None) -> list[Shown]:
    """The certificates in a folder (`*.pem`), the authority first, or in one file.

    Raises:
        CertificateMissing: no such path, or a folder without any.
        CertificateInvalid: the one file asked for is not a certificate.
    """
    now = now or datetime.now(UTC)
    if not path.is_dir():
        raw = read_bounded(path, mend="Make an authority with `titan certs init`")
        read_certificate(raw, str(path))
        return [_shown(path, now)]
    revoked = _revoked(path)
    found = sorted((p for p in path.glob("*.pem") if p.name != LIST_FILE), key=lambda p: (p.name != "ca.pem", p.name))
    if not found:
        raise CertificateMissing(f"{path} holds no certificate", "Make an authority with `titan certs init`")
    return [_shown(p, now, revoked) for p in found]


def _revoked(folder: Path) -> frozenset[int]:
    """Serials on the folder's list; none when there is no list, or none that can be trusted."""
    ca = folder / "ca.pem"
    try:
        return load_revocations(ca, read_bounded(ca, mend="")).serials
    except SecurityError:
        return frozenset()


def _shown(path: Path, now: datetime, revoked: frozenset[int] = frozenset()) -> Shown:
    has_key = path.with_suffix(".key").exists()
    try:
        certificate = read_certificate(read_bounded(path, mend=""), str(path))
        end, start = certificate.not_valid_after_utc, certificate.not_valid_before_utc
        subject = certificate.subject.rfc4514_string()
    except (SecurityError, ValueError):
        return Shown(path, "", "", (), None, "unreadable", has_key)
    state = "expired" if now > end else "early" if now < start else "soon" if end - now < SOON else "ok"
    if certificate.serial_number in revoked:
        state = "revoked"
    try:
        identity = parse_identity(certificate)
    except SecurityError:
        return Shown(
            path,
            subject.removeprefix("CN=").removesuffix(",O=Titan"),
            "authority" if path.stem == "ca" else "",
            (),
            end,
            state,
            has_key,
        )
    return Shown(path, identity.name, str(identity.role), identity.hosts, end, state, has_key)


def _renewal(row: Shown) -> str:
    if row.role == "authority":
        return "`titan certs init --force`, then issue all certificates again"
    return f"`titan certs issue {row.subject} --role {row.role}{''.join(f' --host {h}' for h in row.hosts)} --force`"


def _row_json(row: Shown) -> dict[str, object]:
    return {
        "path": str(row.path),
        "subject": row.subject,
        "role": row.role,
        "hosts": list(row.hosts),
        "expires": row.not_after.isoformat() if row.not_after else None,
        "state": row.state,
        "key": row.has_key,
    }


def _say(sentence: str) -> None:
    Console(soft_wrap=True).print(Text(sentence))
