"""The certificates of a cluster while its coordinator runs: seen to before one of them ends.

Where the authority's key lies beside ca.pem they are renewed in good time; elsewhere the log says which ends, when, and
what to do. The keepers of the workers call this with every heartbeat; it opens no connection and has no thread.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

from titan.common.errors import TitanError
from titan.common.log import get_logger
from titan.common.security.authority import Authority, issue, load_authority
from titan.common.security.channel import CheckedChannel
from titan.common.security.credentials import Credentials
from titan.common.security.identity import Identity
from titan.common.security.own import OwnCertificate, ending
from titan.common.security.renewal import renew_worker, worn

log = get_logger("coordinator.certificates")

LOOK_EVERY_S = 3600.0
SAY_EVERY_S = 24 * 3600.0


class Certificates:
    """Thread-safe.

    Args:
        own: this coordinator's.
    """

    def __init__(self, own: OwnCertificate) -> None:
        self.own = own
        self._looked: dict[str, float] = {}
        self._said: dict[int, float] = {}
        self._said_problem = ""
        self._lock = threading.Lock()

    @property
    def current(self) -> Credentials:
        return self.own.current

    def look_at_own(self) -> None:
        """Take what was put on disk into use, and see to its end."""
        with self._lock:
            if self.own.refresh():
                log.info("certificate renewed", until=f"{self.current.identity.not_after:%Y-%m-%d}")
                self._looked.pop("own", None)
            if self.own.problem != self._said_problem:
                self._said_problem = self.own.problem
                if self._said_problem:
                    log.error(f"the certificate on disk is not used: {self._said_problem}")
            if not self._is_time("own"):
                return
            identity = self.current.identity
            if worn(identity) and (authority := self._authority()) is not None:
                self._renew_own(authority, identity)
            self._say(self.current.identity, str(self.current.cert_path))

    def look_at(self, checked: CheckedChannel) -> bool:
        """See to a worker's; True when it has a new one, and a channel of its own has to be opened to it."""
        with self._lock:
            if not self._is_time(f"worker {checked.peer.name}"):
                return False
            renewed = False
            if worn(checked.peer) and (authority := self._authority()) is not None:
                try:
                    until = renew_worker(checked, authority).not_after
                    log.info("a worker's certificate was renewed", worker=checked.peer.name, until=f"{until:%Y-%m-%d}")
                    renewed = True
                except TitanError as error:
                    log.warning(f"a worker's certificate could not be renewed: {error}", worker=checked.peer.name)
            if not renewed:
                self._say(checked.peer, "its folder")
            return renewed

    # with the lock --------------------------------------------------------------------------------------------------

    def _is_time(self, what: str) -> bool:
        now = time.monotonic()
        if self._looked.get(what, -LOOK_EVERY_S) + LOOK_EVERY_S > now:
            return False
        self._looked[what] = now
        return True

    def _renew_own(self, authority: Authority, identity: Identity) -> None:
        if self.current.cert_path != authority.folder / f"{identity.name}.pem":
            return  # it is kept somewhere else
        try:
            issue(authority, identity.name, role=identity.role, hosts=identity.hosts, force=True)
        except TitanError as error:
            log.warning(f"this coordinator's certificate could not be renewed: {error}")
            return
        if self.own.refresh():
            log.info("certificate renewed", until=f"{self.current.identity.not_after:%Y-%m-%d}")

    def _authority(self) -> Authority | None:
        folder = self.current.ca_path.parent
        if not (folder / "ca.key").exists():
            return None
        try:
            return load_authority(folder)
        except TitanError as error:
            log.warning(f"certificates are not renewed: {error}")
            return None

    def _say(self, identity: Identity, place: str) -> None:
        sentence = ending(identity, place, now=datetime.now(UTC))
        now = time.monotonic()
        if sentence and self._said.get(identity.serial, -SAY_EVERY_S) + SAY_EVERY_S <= now:
            self._said[identity.serial] = now
            log.warning(sentence)
