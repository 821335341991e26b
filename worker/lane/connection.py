"""One open lane at the worker: frames become requests, outcomes become frames.

Called by whoever reads (see `Poller`) and, to answer, by the MLX thread. A malformed frame ends this lane only.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from titan.common.errors import SessionUnknown, TitanError, WireError, WorkerDraining, WorkerLost
from titan.common.log import get_logger
from titan.common.metrics import Tally
from titan.common.wire.checks import Limits
from titan.common.wire.frames import (
    Kind,
    Parts,
    decode_execute,
    decode_hint,
    encode_failure,
    encode_result,
    pack,
    whole,
)
from titan.common.wire.lane import Frame, LaneSocket
from titan.common.wire.messages import ExecuteCall, ExecuteResult, Hint
from titan.worker.lane.counts import LaneCounts
from titan.worker.poller import Poller
from titan.worker.requests import Request, arrival
from titan.worker.sessions import Session, Sessions

log = get_logger("worker.lane")


class Door(Protocol):
    """Where a lane hands over what comes. Called by the reader."""

    def admit(self, request: Request) -> None:
        """Queue a request, or raise the TitanError that refuses it at once."""

    def hint(self, hint: Hint | None, session: Session) -> None:
        """Note a hint; None for one that is none."""


class LaneConnection:
    """A lane of one session.

    Args:
        sock: opened; owned from now on.
        session: that the token stood for.
        limits: as agreed at Hello.
        sessions: to see whether the session still lives.
        door: where requests are queued, or refused at once, and hints noted.
        poller: told when a reply did not fit the socket.
        answers: counts them, by transport and result.
    """

    def __init__(
        self,
        sock: LaneSocket,
        session: Session,
        limits: Limits,
        sessions: Sessions,
        door: Door,
        poller: Poller,
        counts: LaneCounts,
        answers: Tally,
    ) -> None:
        self.session = session
        self._answers = answers
        self._socket, self._limits = sock, limits
        self._sessions, self._door, self._poller, self._counts = sessions, door, poller, counts

    def fileno(self) -> int:
        return self._socket.fileno()

    def on_readable(self) -> bool:
        try:
            for frame in self._socket.receive():
                if frame.header.kind == Kind.PING:
                    self._pong(frame)
                elif frame.header.kind == Kind.HINT:
                    self._hint(frame)
                else:
                    self._execute(frame)
        except WireError as error:
            self._counts.malformed += 1
            log.warning(f"lane closed: {error}", coordinator=self.session.coordinator)
            return False
        except WorkerLost as error:
            log.info(f"lane ended: {error}", coordinator=self.session.coordinator, epoch=self.session.epoch)
            return False
        return True

    def on_writable(self) -> bool:
        try:
            self._socket.flush()
        except WorkerLost:
            return False  # the next read says so and takes the lane out
        return self._socket.unsent_bytes > 0

    def close(self) -> None:
        self._socket.close()
        self._sessions.end_stream(self.session)
        self._counts.open -= 1

    def interrupt(self) -> None:
        """End the lane from any thread; the reader then takes it out."""
        self._socket.interrupt()

    def answer(self, frame: Frame, outcome: ExecuteResult | TitanError, queue_us: int = 0) -> None:
        """Reply to the request in `frame`, whose memory is free afterwards."""
        epoch = self.session.epoch
        if isinstance(outcome, ExecuteResult):
            parts = encode_result(outcome, epoch, self._limits.dtype, queue_us)
            self._answers.add("lane", "ok")
        else:
            self._answers.add("lane", outcome.code)
            parts = whole(encode_failure(frame.header.request_id, epoch, outcome))
        try:
            self._send(parts)
        finally:
            self._socket.release(frame)

    def announce_draining(self) -> None:
        """Tell the coordinator to send nothing more; what it has sent by then is answered."""
        notice = WorkerDraining("the worker is shutting down", "wait until it is started again")
        self._send(whole(encode_failure(0, self.session.epoch, notice)))

    def _send(self, parts: Parts) -> None:
        try:
            self._socket.send(parts)
        except WorkerLost:
            return  # nobody is there to be answered; the next read takes the lane out
        if self._socket.unsent_bytes:
            self._poller.watch_writes(self)

    def _pong(self, frame: Frame) -> None:
        header = pack(Kind.PONG, length=len(frame.payload), request_id=frame.header.request_id)
        self._send(Parts((header, frame.payload), len(header) + len(frame.payload)))
        self._socket.release(frame)

    def _hint(self, frame: Frame) -> None:
        hint: Hint | None = None
        if frame.header.epoch == self.session.epoch and self._sessions.is_live(self.session):
            with contextlib.suppress(WireError):  # a hint that is none is no harm
                hint = decode_hint(frame.header, frame.payload, self._limits)
        self._door.hint(hint, self.session)
        self._socket.release(frame)

    def _execute(self, frame: Frame) -> None:
        try:
            if frame.header.epoch != self.session.epoch or not self._sessions.is_live(self.session):
                raise SessionUnknown(f"session epoch {frame.header.epoch} is not open here", "say Hello again")
            call = decode_execute(frame.header, frame.payload, self._limits)
            self._door.admit(_LaneRequest(call, self, frame))
        except TitanError as error:
            self.answer(frame, error)


class _LaneRequest:
    """A request that arrived in `frame`, whose memory its arrays view."""

    __slots__ = ("_frame", "_lane", "arrived", "call", "origin")

    def __init__(self, call: ExecuteCall, lane: LaneConnection, frame: Frame) -> None:
        self.call = call
        self.origin = lane.session.id
        self.arrived = arrival()
        self._lane, self._frame = lane, frame

    def respond(self, outcome: ExecuteResult | TitanError, queue_us: int) -> None:
        self._lane.answer(self._frame, outcome, queue_us)
