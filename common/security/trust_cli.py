"""`titan certs revoke` and `titan certs renew`: what needs the workers beside the authority. Only wires and shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from titan.common.config.hosts import HostsConfig, Worker, load_hosts
from titan.common.errors import CertificateMissing, TitanError
from titan.common.security.authority import DEFAULT_DAYS, Authority, issue, load_authority
from titan.common.security.channel import CheckedChannel, open_channel, sync_revocations
from titan.common.security.credentials import Credentials, load_credentials
from titan.common.security.files import read_bounded
from titan.common.security.identity import Identity, Role, parse_identity
from titan.common.security.renewal import due, renew_worker
from titan.common.security.revocation import Revocations
from titan.common.security.revoke import list_bearer
from titan.common.security.revoke import revoke as revoke_name

DIR = typer.Option("--dir", help="Folder of the cluster's authority.")
HOSTS = typer.Option(help="The cluster's machines.")


def register(certs: typer.Typer) -> None:
    """Mount both on `titan certs`."""
    certs.command("revoke")(revoke)
    certs.command("renew")(renew)


def revoke(
    name: Annotated[str, typer.Argument(help="Whose certificates: the name in hosts.yaml.")],
    directory: Annotated[Path, DIR] = Path("certs"),
    hosts: Annotated[Path, HOSTS] = Path("hosts.yaml"),
) -> None:
    """Refuse every certificate that NAME has had until now, here and on all workers.

    Open connections end within seconds, a coordinator's too. A worker that cannot be reached hears of it when a
    coordinator next connects, a coordinator on another machine from any worker that it uses.
    Exit status 1 when a worker could not be told.
    """
    authority = load_authority(directory)
    done = revoke_name(authority, name)
    _say(f"Revoked {len(done.identities)} certificate(s) of {done.identities[0]}; {directory / 'revoked.pem'} says so.")
    if not hosts.exists():
        _say(f"{hosts} does not exist: workers hear of it when a coordinator of this folder next connects.")
        return
    config = load_hosts(hosts)
    if name == config.coordinator.name:
        _say(
            "This is the coordinator: `titan certs issue … --force` gives it a new certificate, with which it goes on."
        )
    if config.tls.ca.exists():  # hosts.yaml may use another folder
        Revocations(config.tls.ca, read_bounded(config.tls.ca, mend="")).offer(done.revocations.pem, str(directory))
    with list_bearer(authority) as (credentials, revocations):

        def tell(channel: CheckedChannel) -> str:
            sync_revocations(channel, revocations, timeout_s=config.timeouts.probe)
            return "knows"

        others = [worker for worker in config.workers if worker.name != name]
        if not all([_with_worker(worker, config, credentials, tell) for worker in others]):
            raise typer.Exit(1)


def renew(
    names: Annotated[list[str] | None, typer.Argument(help="Whose; by default all that end within 30 days.")] = None,
    directory: Annotated[Path, DIR] = Path("certs"),
    hosts: Annotated[Path, HOSTS] = Path("hosts.yaml"),
    days: Annotated[int, typer.Option(help="How long the new ones are valid.")] = DEFAULT_DAYS,
) -> None:
    """Renew certificates: a worker makes a new key and gets it signed while it serves; those kept here are replaced.

    Exit status 1 when one could not be renewed. Run it from a timer, and certificates never end unnoticed.
    """
    authority = load_authority(directory)
    config = load_hosts(hosts)
    wanted = _wanted(directory, authority, names)
    if not wanted:
        _say("No certificate ends within 30 days.")
    credentials = load_credentials(config.tls.ca, config.tls.cert, config.tls.key)
    ok = True
    for identity in wanted:
        if identity.role is not Role.WORKER:
            renewed = issue(authority, identity.name, role=identity.role, hosts=identity.hosts, days=days, force=True)
            until = f"{renewed.identity.not_after:%Y-%m-%d}"
            _say(f"{identity}: valid until {until}; {_what_then(identity.role)}")
            continue
        if identity.name not in {worker.name for worker in config.workers}:
            _say(f"{identity}: not in {hosts}. Add it, or enrol it again with `titan enroll`.")
            ok = False
            continue

        def sign_anew(channel: CheckedChannel) -> str:
            return f"valid until {renew_worker(channel, authority, days=days).not_after:%Y-%m-%d}"

        ok &= _with_worker(config.worker(identity.name), config, credentials, sign_anew)
    if not ok:
        raise typer.Exit(1)


def _what_then(role: Role) -> str:
    if role is Role.COORDINATOR:
        return "a coordinator that runs uses it for its connections within seconds, nothing has to be started again."
    return "copy it and its key to where they are used."


def _wanted(directory: Path, authority: Authority, names: list[str] | None) -> list[Identity]:
    """The certificates of this cluster in `directory` that are named, or due."""
    found: dict[str, Identity] = {}
    for path in sorted(directory.glob("*.pem")):
        try:
            identity = parse_identity(read_bounded(path, mend=""))
        except TitanError:
            continue
        if identity.cluster == authority.cluster:
            found[identity.name] = identity
    for name in names or ():
        if name not in found:
            raise CertificateMissing(f"{directory} has no certificate of {name!r}", "See `titan certs show`")
    return [i for i in found.values() if (i.name in names if names else due(i))]


def _with_worker(
    worker: Worker, config: HostsConfig, credentials: Credentials, act: Callable[[CheckedChannel], str]
) -> bool:
    """Do something over the first address that answers; False, and said why, when there is none."""
    reasons = []
    for address in worker.addresses:
        try:
            with open_channel(worker.name, address, credentials, timeout_s=config.timeouts.connect) as channel:
                _say(f"{worker.name}: {act(channel)}")
                return True
        except TitanError as error:
            reasons.append(str(error))
    _say(f"{worker.name}: {' '.join(reasons)}")
    return False


def _say(sentence: str) -> None:
    Console(soft_wrap=True).print(Text(sentence))
