"""Certificates, keys and the list of revoked ones on this machine, before any connection is tried."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from titan.common.errors import SecurityError
from titan.common.security.credentials import Credentials
from titan.common.security.identity import Identity, Role, require_role
from titan.common.security.renewal import due
from titan.common.security.revocation import load_revocations
from titan.coordinator.doctor.finding import Finding, failed

AUTHORITY_SOON = timedelta(days=180)
CHECK = "certificates"


def check_certificates(
    load: Callable[[], Credentials], folder: Path, role: Role, *, now: datetime | None = None
) -> Iterator[Finding]:
    """Own certificate, its authority, the modes of all keys in `folder`.

    Args:
        load: gives the credentials, or raises the SecurityError that a daemon would end with.
        role: what they have to be for.
    """
    now = now or datetime.now(UTC)
    try:
        credentials = load()
        require_role(credentials.identity, role)
        known = load_revocations(credentials.ca_path, credentials.ca_pem)
    except SecurityError as error:
        yield failed(CHECK, str(folder), error)
        yield from check_modes(folder)
        return
    yield check_expiry(credentials.identity, now)
    authority = x509.load_pem_x509_certificates(credentials.ca_pem)[0]
    left = authority.not_valid_after_utc - now
    level, mend = ("ok", "") if left > AUTHORITY_SOON else ("warn", "Plan a new cluster: `titan certs init --force`")
    text = f"the authority is valid until {authority.not_valid_after_utc:%Y-%m-%d}"
    yield Finding(
        CHECK, str(credentials.ca_path), level, f"{text}; {len(known.serials)} certificates are revoked", mend
    )
    yield from check_modes(folder)


def check_expiry(identity: Identity, now: datetime) -> Finding:
    """Whether a valid certificate will be valid in a month."""
    days = (identity.not_after - now).days
    text = f"{identity}: valid until {identity.not_after:%Y-%m-%d}, {days} days"
    if due(identity, now=now):
        return Finding(CHECK, identity.name, "warn", text, f"Run `titan certs renew {identity.name}`")
    return Finding(CHECK, identity.name, "ok", text)


def check_modes(folder: Path) -> Iterator[Finding]:
    """Keys that others can read, and a folder that others can write to."""
    try:
        keys = sorted(folder.glob("*.key"))
        folder_mode = stat.S_IMODE(folder.stat().st_mode)
        open_keys = [key.name for key in keys if key.stat().st_mode & 0o077]
    except OSError as error:
        yield Finding("key modes", str(folder), "fail", f"cannot be looked at ({error.strerror})", "Check its owner")
        return
    if folder_mode & 0o022:
        text = f"others can write to the folder (mode {folder_mode:o})"
        yield Finding("key modes", str(folder), "fail", text, f"Run `chmod 700 {folder}`")
    if open_keys:
        text = f"others can read {', '.join(open_keys)}"
        yield Finding("key modes", str(folder), "fail", text, f"Run `chmod 600 {folder}/*.key`")
    elif not folder_mode & 0o022:
        yield Finding("key modes", str(folder), "ok", f"{len(keys)} keys, readable by their owner only")
