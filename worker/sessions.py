"""Who may ask this worker for what: one session a coordinator process, named by certificate, numbered by epoch.

A reconnect is a new session with a higher epoch; requests of the old one are refused. Knows nothing of experts.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field

from titan.common.errors import SessionUnknown, WorkerOverloaded, WorkerRefused
from titan.worker.share import Share

MAX_SESSIONS = 8
MAX_STREAMS_PER_SESSION = 2


@dataclass(slots=True, eq=False)
class Session:
    """One coordinator process. `assigned`: what it wants here."""

    id: str
    epoch: int
    coordinator: str
    instance_id: str
    peer: str
    assigned: Share = field(default_factory=Share)
    streams: int = 0
    last_seen: float = field(default_factory=time.monotonic)


class Sessions:
    """Thread-safe registry of live sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._epoch = 0  # so many have been opened
        self._lock = threading.Lock()

    @property
    def opened(self) -> int:
        return self._epoch

    def open(self, coordinator: str, instance_id: str, peer: str) -> Session:
        """Open a session, replacing earlier ones of the same coordinator.

        Raises:
            WorkerRefused: another process with the same certificate is executing here right now.
            WorkerOverloaded: too many coordinators.
        """
        with self._lock:
            for old in list(self._sessions.values()):
                if old.coordinator != coordinator:
                    continue
                if old.instance_id != instance_id and old.streams > 0:
                    raise WorkerRefused(
                        f"coordinator {coordinator!r} is already connected from {old.peer} by another process",
                        "stop that one, or issue a certificate with another name for this one",
                    )
                del self._sessions[old.id]
            if len(self._sessions) >= MAX_SESSIONS:
                idle = [s for s in self._sessions.values() if s.streams == 0]
                if not idle:
                    raise WorkerOverloaded(f"{MAX_SESSIONS} coordinators are connected already", "stop one of them")
                del self._sessions[min(idle, key=lambda s: s.last_seen).id]
            self._epoch += 1
            session = Session(secrets.token_hex(16), self._epoch, coordinator, instance_id, peer)
            self._sessions[session.id] = session
            return session

    def get(self, session_id: str, epoch: int, coordinator: str) -> Session:
        """The live session with this id and epoch, if it is this coordinator's.

        Raises:
            SessionUnknown: it is not, or has been replaced.
        """
        session = self._sessions.get(session_id)
        if session is None or session.epoch != epoch or session.coordinator != coordinator:
            raise SessionUnknown(
                f"session {session_id[:32]!r} epoch {epoch} of coordinator {coordinator!r} is not open here",
                "say Hello again",
            )
        session.last_seen = time.monotonic()
        return session

    def is_live(self, session: Session) -> bool:
        """Whether the session has neither been closed nor replaced."""
        return self._sessions.get(session.id) is session

    def close(self, session: Session) -> None:
        with self._lock:
            if self._sessions.get(session.id) is session:
                del self._sessions[session.id]

    def begin_stream(self, session: Session) -> None:
        """Count an Execute stream or a lane; WorkerOverloaded beyond the limit."""
        with self._lock:
            if session.streams >= MAX_STREAMS_PER_SESSION:
                raise WorkerOverloaded(f"session of {session.coordinator!r} has {session.streams} streams open already")
            session.streams += 1

    def end_stream(self, session: Session) -> None:
        with self._lock:
            session.streams -= 1
            session.last_seen = time.monotonic()

    def live(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())
