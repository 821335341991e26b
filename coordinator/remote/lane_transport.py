"""Execute over the lane: no thread of its own, the engine's thread writes and reads the socket itself."""

from __future__ import annotations

import ssl
import time

from titan.common.config.address import split_address
from titan.common.errors import ClusterError, SessionUnknown, WireError, WorkerBadReply, WorkerDraining, WorkerLost
from titan.common.security.identity import Role, tls_name
from titan.common.security.tls import explain_tls_failure
from titan.common.wire import frames
from titan.common.wire.frames import TO_COORDINATOR, Kind
from titan.common.wire.lane import Frame, LaneSocket, connect
from titan.common.wire.messages import ExecuteCall, ExecuteResult, Hint
from titan.coordinator.remote.transport import Arrival
from titan.proto.titan.v1 import worker_pb2 as pb

_OPENING = frozenset({Kind.OPENED, Kind.FAILURE})
FIRST_PING = 1 << 63


class LaneTransport:
    """Carries Execute of one session over an opened lane, which it owns."""

    name = "lane"

    def __init__(self, lane: LaneSocket, epoch: int, worker: str, dtype: str) -> None:
        self.worker = worker
        self.leaving: ClusterError | None = None
        self.outstanding = 0
        self._lane, self._epoch, self._dtype = lane, epoch, dtype

    def fileno(self) -> int:
        return self._lane.fileno()

    @property
    def unsent(self) -> bool:
        return self._lane.unsent_bytes > 0

    @property
    def records(self) -> int:
        return self._lane.records

    def send(self, call: ExecuteCall) -> None:
        try:
            self._lane.send(frames.encode_execute(call, self._epoch, self._dtype))
            self.outstanding += 1
        except WorkerLost as error:
            raise self._lost(error) from error

    def hint(self, hint: Hint) -> bool:
        if self.unsent:
            return False
        try:
            self._lane.send(frames.encode_hint(hint, self._epoch))
        except WorkerLost:
            return False  # the next call says so
        return True

    def flush(self) -> None:
        try:
            self._lane.flush()
        except WorkerLost as error:
            raise self._lost(error) from error

    def receive(self) -> list[Arrival]:
        try:
            received = self._lane.receive()
        except WorkerLost as error:
            raise self._lost(error) from error
        except WireError as error:
            raise WorkerBadReply(f"worker {self.worker} sent what is no frame: {error}") from error
        arrivals = []
        for frame in received:
            header = frame.header
            if header.kind == Kind.FAILURE and header.request_id == 0:
                self._notice(frame)
            elif header.kind in (Kind.RESULT, Kind.FAILURE) and header.epoch == self._epoch:
                self.outstanding -= 1
                arrivals.append(Arrival(header.request_id, frame))
            else:
                self._lane.release(frame)  # of another epoch, or an answer nobody asked for: harmless
        return arrivals

    def decode(self, arrival: Arrival, call: ExecuteCall) -> ExecuteResult:
        frame = arrival.payload
        assert isinstance(frame, Frame)
        return frames.decode_result(frame.header, frame.payload, call, dtype=self._dtype, worker=self.worker)

    def release(self, arrival: Arrival) -> None:
        assert isinstance(arrival.payload, Frame)
        self._lane.release(arrival.payload)

    def ping(self, payload: bytes, timeout_s: float) -> None:
        """One frame there and back, nothing executed. For measuring, while no call is under way.

        Raises:
            WorkerTimeout: it did not come back in time. WorkerLost: the lane has ended.
        """
        header = frames.pack(Kind.PING, length=len(payload), request_id=FIRST_PING)
        self._lane.send(frames.Parts((header, payload), len(header) + len(payload)))
        frame = self._lane.wait_for_frame(time.monotonic() + timeout_s)
        self._lane.release(frame)
        if frame.header.kind != Kind.PONG or frame.header.length != len(payload):
            raise WorkerBadReply(f"worker {self.worker} answered a ping with something else")

    def close(self) -> None:
        self._lane.close()

    def _notice(self, frame: Frame) -> None:
        code, message = frames.split_failure(frame.payload)
        self._lane.release(frame)
        kind = WorkerDraining if code == "worker_draining" else WorkerLost
        self.leaving = kind(f"worker {self.worker} says: {message[:300]}")

    def _lost(self, error: WorkerLost) -> WorkerLost:
        return WorkerLost(f"worker {self.worker}: {error.cause}")


def open_lane(
    address: str, hello: pb.HelloReply, context: ssl.SSLContext, worker: str, dtype: str, timeout_s: float
) -> LaneTransport:
    """Open the lane that Hello offered, on the host that answered it.

    Args:
        address: `host:port` at which the worker answered Hello.
        context: the coordinator's client context.

    Raises:
        WorkerUnreachable: nothing answers there, or not with this worker's certificate.
        WorkerTimeout: it took longer than `timeout_s`.
        SessionUnknown: the worker does not accept the token.
        WorkerLost, WorkerBadReply: it closed the connection, or answered something else.
    """
    deadline = time.monotonic() + timeout_s
    host, _ = split_address(address)
    try:
        lane = connect(host, hello.lane_port, context, tls_name(worker, Role.WORKER), _OPENING, deadline)
    except OSError as error:
        raise explain_tls_failure(f"{host}:{hello.lane_port}", error) from error
    try:
        lane.send(frames.whole(frames.pack(Kind.OPEN, length=len(hello.lane_token)) + hello.lane_token))
        frame = lane.wait_for_frame(deadline)
        if frame.header.kind == Kind.FAILURE:
            code, message = frames.split_failure(frame.payload)
            kind = SessionUnknown if code == "session_unknown" else WorkerLost
            raise kind(f"worker {worker} did not open a lane: {message[:300]}")
        if frame.header.epoch != hello.session.epoch:
            raise WorkerBadReply(f"worker {worker} opened a lane of epoch {frame.header.epoch}")
        lane.release(frame)
    except WireError as error:
        lane.close()
        raise WorkerBadReply(f"worker {worker} answered the opening of a lane with what is no frame") from error
    except BaseException:
        lane.close()
        raise
    lane.allowed = TO_COORDINATOR - {Kind.OPENED}
    return LaneTransport(lane, hello.session.epoch, worker, dtype)
