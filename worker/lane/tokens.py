"""Single-use tokens that Hello issues and a lane is opened with. Knows sessions, not sockets."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from dataclasses import dataclass

from titan.common.errors import SessionUnknown
from titan.common.wire.frames import TOKEN_BYTES
from titan.worker.sessions import Session

TOKEN_LIFE_S = 30.0
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Grant:
    session: Session
    certificate: bytes
    expires: float


class LaneTokens:
    """Tokens not yet used. Thread-safe; keeps only their hashes."""

    def __init__(self) -> None:
        self._grants: dict[bytes, _Grant] = {}
        self._lock = threading.Lock()

    def issue(self, session: Session, certificate: bytes) -> bytes:
        """A token for one lane of `session`, good for the peer with this certificate (its `certificate_hash`)."""
        token = secrets.token_bytes(TOKEN_BYTES)
        now = time.monotonic()
        with self._lock:
            self._grants = {key: grant for key, grant in self._grants.items() if grant.expires > now}
            while len(self._grants) >= MAX_TOKENS:
                del self._grants[next(iter(self._grants))]
            self._grants[_key(token)] = _Grant(session, certificate, now + TOKEN_LIFE_S)
        return token

    def redeem(self, token: bytes, certificate: bytes) -> Session:
        """The session a token stands for; the token is used up, whatever comes of it.

        Raises:
            SessionUnknown: unknown, used, expired, or issued to another certificate. The peer is not told which.
        """
        with self._lock:
            grant = self._grants.pop(_key(token), None)
        if grant is None or grant.certificate != certificate or grant.expires <= time.monotonic():
            raise SessionUnknown("the lane's token is not valid", "say Hello again")
        return grant.session


def _key(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def certificate_hash(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()
