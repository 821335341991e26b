"""Execute over gRPC's bidirectional stream. One reader thread a session moves replies into the shared inbox."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import grpc

from titan.common.errors import ClusterError, SessionUnknown, WorkerBadReply, WorkerLost, WorkerRefused
from titan.common.wire.codec import decode_result, encode_call
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.coordinator.remote.transport import Arrival, Inbox, Transport
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1.worker_pb2_grpc import WorkerStub


class GrpcTransport:
    """Carries Execute of one session.

    Args:
        stub: of the channel to the worker; the caller closes the channel.
        session: as Hello gave it.
        worker: name, for errors.
        dtype: of activations on the wire.
        inbox: where replies go.
        on_end: told, on the reader's thread, when the stream has ended.
    """

    def __init__(
        self,
        stub: WorkerStub,
        session: pb.Session,
        worker: str,
        dtype: str,
        inbox: Inbox,
        on_end: Callable[[Transport, ClusterError], None],
    ) -> None:
        self.worker = worker
        self._on_end = on_end
        self._session = session
        self._dtype = dtype
        self._inbox = inbox
        self._outgoing: SimpleQueue[pb.ExecuteRequest | None] = SimpleQueue()
        self._stream = stub.Execute(iter(self._outgoing.get, None))
        self._reader = threading.Thread(target=self._read, name=f"titan-replies-{worker}", daemon=True)
        self._reader.start()

    def send(self, call: ExecuteCall) -> None:
        self._outgoing.put(encode_call(call, self._session))

    def decode(self, arrival: Arrival, call: ExecuteCall) -> ExecuteResult:
        reply = arrival.payload
        assert isinstance(reply, pb.ExecuteReply)
        if reply.HasField("failure"):
            kind = SessionUnknown if reply.failure.code == "session_unknown" else WorkerRefused
            raise kind(f"worker {self.worker} did not execute layer {call.layer}: {reply.failure.message[:500]}")
        return decode_result(reply, call, dtype=self._dtype, worker=self.worker)

    def close(self) -> None:
        self._outgoing.put(None)
        self._stream.cancel()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=5)

    def _read(self) -> None:
        end: ClusterError = WorkerLost(f"worker {self.worker} closed the connection")
        try:
            for reply in _typed(self._stream):
                self._inbox.put(Arrival(self, reply.request_id, reply))
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            detail = (error.details() or "") if isinstance(error, grpc.Call) else str(error)
            end = WorkerLost(f"the connection to worker {self.worker} broke ({_name(code)}: {detail[:300]})")
        except (ValueError, TypeError) as error:  # a message that does not parse
            end = WorkerBadReply(f"worker {self.worker} sent a message that cannot be read ({error})")
        self._outgoing.put(None)
        self._inbox.put(Arrival(self, None, end))
        self._on_end(self, end)


def _typed(stream: object) -> Iterator[pb.ExecuteReply]:
    return iter(stream)  # type: ignore[call-overload]


def _name(code: grpc.StatusCode | None) -> str:
    return code.name.lower() if code is not None else "unknown"
