"""Accepting lanes: TCP, TLS 1.3 with a coordinator's certificate, then one OPEN frame with a token from Hello.

All steps together have one deadline. Few peers are at the door at a time, each with a thread, and whoever crowds it
makes room, so that slow ones keep nobody else out. No frame is read before the peer's certificate has been verified.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from titan.common.door import Door
from titan.common.errors import AddressInUse, TitanError
from titan.common.log import get_logger
from titan.common.log_limit import LimitedLog
from titan.common.metrics import Tally
from titan.common.security.identity import Role, parse_identity, require_role
from titan.common.wire.frames import TO_WORKER, Kind, encode_failure, pack, whole
from titan.common.wire.lane import LaneSocket, accept
from titan.worker.lane.counts import LaneCounts
from titan.worker.lane.tokens import LaneTokens, certificate_hash
from titan.worker.sessions import Session

log = get_logger("worker.lane")

OPEN_TIMEOUT_S = 5.0
MAX_OPENING = 32  # peers between TCP's accept and OPEN, each on a thread: nobody queues behind a slow one
OPENING = frozenset({Kind.OPEN})


class LaneListener:
    """Listens until closed.

    Args:
        host, port: where; port 0 takes a free one.
        context: the worker's server context.
        tokens: what Hello has issued.
        opened: takes over an open lane (it owns the socket); may raise a TitanError to refuse it.
        refusals: counts lanes that were refused, as "lane" and the error's code, or "handshake".
        strangers: told of each.

    Raises:
        AddressInUse: host and port cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext,
        tokens: LaneTokens,
        opened: Callable[[LaneSocket, Session], None],
        counts: LaneCounts,
        refusals: Tally,
        strangers: LimitedLog,
    ) -> None:
        self._refusals, self._strangers = refusals, strangers
        context.num_tickets = 0  # nobody resumes a lane
        self._context, self._tokens, self._opened, self._counts = context, tokens, opened, counts
        try:
            self._listener = _listen(host, port)
        except OSError as error:
            raise AddressInUse(
                f"{host}:{port} cannot be listened on for lanes ({error.strerror or error})",
                "stop what uses it, or give another --lane-port",
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._door = Door(MAX_OPENING)
        self._lock = threading.Lock()
        self._openers = ThreadPoolExecutor(MAX_OPENING, thread_name_prefix="titan-lane-open")
        self._thread = threading.Thread(target=self._accept, name="titan-lane-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        self._door.close()
        self._openers.shutdown(wait=True, cancel_futures=True)

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # out of descriptors: somebody else has to give one back first
                if self._closed():
                    return
                continue
            self._counts.accepted += 1
            self._door.enter(sock, str(peer[0]))
            self._openers.submit(self._open, sock, str(peer[0]), time.monotonic() + OPEN_TIMEOUT_S)

    def _closed(self) -> bool:
        try:
            return not self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:
            return True

    def _open(self, sock: socket.socket, peer: str, deadline: float) -> None:
        reason = "handshake"
        try:
            lane = accept(sock, self._context, OPENING, deadline)
            with self._lock:
                self._counts.proved += 1
            try:
                session = self._admit(lane, deadline)
                lane.allowed = TO_WORKER - OPENING
                lane.send(whole(pack(Kind.OPENED, epoch=session.epoch)))
                self._door.leave(sock)
                self._opened(lane, session)
                log.info("lane opened", coordinator=session.coordinator, epoch=session.epoch, peer=peer)
            except TitanError as error:
                reason = error.code
                with contextlib.suppress(TitanError):
                    lane.send(whole(encode_failure(0, 0, error)))
                self._door.leave(sock)
                lane.close()
                raise
        except (TitanError, OSError) as error:
            with self._lock:
                self._counts.refused += 1
            self._refusals.add("lane", reason)
            self._strangers.warning("lane refused", str(error), peer=peer)
        finally:
            self._door.leave(sock)

    def _admit(self, lane: LaneSocket, deadline: float) -> Session:
        certificate = lane.peer_certificate()
        identity = parse_identity(certificate)
        require_role(identity, Role.COORDINATOR)
        frame = lane.wait_for_frame(deadline)
        session = self._tokens.redeem(bytes(frame.payload), certificate_hash(certificate))
        lane.release(frame)
        return session


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=64)
