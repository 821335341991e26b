"""Execute over gRPC's bidirectional stream. A reader thread a session wakes the engine's poll through a socket pair."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue

import grpc

from titan.common.errors import ClusterError, WorkerBadReply, WorkerLost
from titan.common.wire.codec import decode_result, encode_call, encode_hint
from titan.common.wire.messages import ExecuteCall, ExecuteResult, Hint
from titan.coordinator.remote.transport import Arrival
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1.worker_pb2_grpc import WorkerStub

CLOSE_TIMEOUT_S = 5.0
HINT_TIMEOUT_S = 1.0
MAX_HINTS = 4  # under way at a time


class GrpcTransport:
    """Carries Execute of one session.

    Args:
        stub: of the channel to the worker; the caller closes the channel.
        session: as Hello gave it.
        worker: name, for errors.
        dtype: of activations on the wire.
    """

    name = "grpc"

    def __init__(self, stub: WorkerStub, session: pb.Session, worker: str, dtype: str) -> None:
        self.worker = worker
        self.leaving: ClusterError | None = None
        self.unsent = False
        self.outstanding = self.records = 0
        self._session, self._dtype = session, dtype
        self._end: ClusterError | None = None
        self._replies: deque[pb.ExecuteReply] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._outgoing: SimpleQueue[pb.ExecuteRequest | None] = SimpleQueue()
        self._stub, self._hints = stub, []
        self._stream = stub.Execute(iter(self._outgoing.get, None))
        self._reader = threading.Thread(target=self._read, name=f"titan-replies-{worker}", daemon=True)
        self._reader.start()

    def fileno(self) -> int:
        return self._wake_in.fileno()

    def send(self, call: ExecuteCall) -> None:
        if self._end is not None:
            raise self._end
        self._outgoing.put(encode_call(call, self._session))
        self.outstanding += 1
        self.records += 1 + (call.activations.nbytes >> 14)

    def hint(self, hint: Hint) -> bool:
        self._hints = [sent for sent in self._hints if not sent.done()]
        if self._end is not None or len(self._hints) >= MAX_HINTS:
            return False
        try:
            self._hints.append(self._stub.Prefetch.future(encode_hint(hint, self._session), timeout=HINT_TIMEOUT_S))
        except ValueError:  # the channel has been closed: the next call says so
            return False
        return True

    def flush(self) -> None:
        """Nothing waits here: gRPC's own threads send."""

    def receive(self) -> list[Arrival]:
        with contextlib.suppress(OSError):
            self._wake_in.recv(4096)
        arrivals = []
        while self._replies:
            reply = self._replies.popleft()
            self.outstanding -= 1
            self.records += len(reply.outputs) >> 14
            arrivals.append(Arrival(reply.request_id, reply))
        if not arrivals and self._end is not None:
            raise self._end
        return arrivals

    def decode(self, arrival: Arrival, call: ExecuteCall) -> ExecuteResult:
        assert isinstance(arrival.payload, pb.ExecuteReply)
        return decode_result(arrival.payload, call, dtype=self._dtype, worker=self.worker)

    def release(self, arrival: Arrival) -> None:
        """Nothing to give back: a message owns its memory."""

    def close(self) -> None:
        self._end = self._end or WorkerLost(f"the session with worker {self.worker} was closed")
        self._outgoing.put(None)
        self._stream.cancel()
        for sent in self._hints:
            sent.cancel()
        self._reader.join(CLOSE_TIMEOUT_S)
        self._wake_in.close()
        self._wake_out.close()

    def _read(self) -> None:
        end: ClusterError = WorkerLost(f"worker {self.worker} closed the connection")
        try:
            for reply in _typed(self._stream):
                self._replies.append(reply)
                self._wake()
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            detail = (error.details() or "") if isinstance(error, grpc.Call) else str(error)
            end = WorkerLost(f"the connection to worker {self.worker} broke ({_name(code)}: {detail[:300]})")
        except (ValueError, TypeError) as error:  # a message that does not parse
            end = WorkerBadReply(f"worker {self.worker} sent a message that cannot be read ({error})")
        self._end = self._end or end
        self._outgoing.put(None)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the poll is awake already; closed: nobody polls
            self._wake_out.send(b"!")


def _typed(stream: object) -> Iterator[pb.ExecuteReply]:
    return iter(stream)  # type: ignore[call-overload]


def _name(code: grpc.StatusCode | None) -> str:
    return code.name.lower() if code is not None else "unknown"
