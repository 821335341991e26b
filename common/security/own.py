"""One's own certificate while a daemon runs: what was put in its place on disk is used for new connections.

Looks when it is asked to; opens no connection and has no thread. Connections that are open stay as they are.
"""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta

from titan.common.errors import SecurityError
from titan.common.security.credentials import Credentials, load_credentials
from titan.common.security.identity import Identity, Role

ENDS_SOON = timedelta(days=14)


class OwnCertificate:
    """Thread-safe.

    Attributes:
        current: in force; another object once another certificate is.
        problem: why the files are not used, empty when they are.
    """

    def __init__(self, credentials: Credentials) -> None:
        self.current = credentials
        self.problem = ""
        self._lock = threading.Lock()
        self._seen = self._stamp()

    def refresh(self) -> bool:
        """Look at the files again; True when others are in force now. What cannot be used leaves the old ones."""
        with self._lock:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._seen = stamp
            old = self.current
            try:
                found = load_credentials(old.ca_path, old.cert_path, old.key_path)
            except SecurityError as error:  # also between the renames of a certificate and its key
                self.problem = str(error)
                return False
            if found == old:
                self.problem = ""
                return False
            of = ("name", "role", "cluster")
            if found.ca_pem != old.ca_pem or any(getattr(found.identity, a) != getattr(old.identity, a) for a in of):
                self.problem = f"{old.cert_path} is of another member or cluster now. Start again to use it."
                return False
            self.current, self.problem = found, ""
            return True

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self.current.ca_path, self.current.cert_path, self.current.key_path))


def _stamp(path: os.PathLike[str]) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def ending(identity: Identity, place: str, *, now: datetime | None = None) -> str:
    """A sentence when a certificate ends within 14 days: whose, where it lies, when, what to do. Otherwise empty."""
    left = identity.not_after - (now or datetime.now(UTC))
    if left > ENDS_SOON:
        return ""
    what = f"the certificate of {identity} in {place}"
    when = f"{identity.not_after:%Y-%m-%d %H:%M} UTC"
    if left < timedelta(0):
        worker = identity.role is Role.WORKER
        mend = "titan-worker --enroll" if worker else f"titan certs issue {identity.name} … --force"
        return f"{what} ended on {when}. Replace it with `{mend}`."
    return (
        f"{what} ends on {when}, in {left.days} days. Run `titan certs renew {identity.name}` on the machine that "
        "holds the cluster's authority; nothing has to be started again."
    )
