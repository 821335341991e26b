"""One end of a lane: TLS 1.3 over a non-blocking TCP socket, frames in and out. The same class at both ends.

TLS runs over memory BIOs: one system call brings or takes any number of records, where `SSLSocket` needs two a record
(measured 2 to 3 us less a round trip at 4 to 16 KiB), and no lock is held while somebody waits for the socket. Safe to
use from several threads. Knows frames, not what they mean.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections import deque
from typing import NamedTuple

from titan.common.errors import WireError, WorkerLost, WorkerTimeout
from titan.common.wire.frames import HEADER_BYTES, Header, Kind, Parts, parse_header
from titan.common.wire.messages import MAX_MESSAGE_BYTES

RECEIVE_BYTES = 128 << 10  # taken from the kernel at once
BUFFER_BYTES = 64 << 10  # a buffer for frames; larger ones are made when a frame needs one, and not kept
SPARE_BUFFERS = 4
WRITE_BYTES = 256 << 10  # encrypted at once
MAX_RECORDS = 1 << 24  # AES-GCM's limit is 2^24.5; whoever opened the lane replaces it long before
MAX_UNSENT_BYTES = 4 * MAX_MESSAGE_BYTES  # beyond it the peer has stopped reading
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPALIVE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))  # s, s, s, probes


class Frame(NamedTuple):
    """A whole frame. `payload` views a buffer that is used again after `LaneSocket.release`."""

    header: Header
    payload: memoryview
    buffer: bytearray


class LaneSocket:
    """Frames over TLS. Made by `connect` or `accept`, which bring the handshake to its end.

    Args:
        sock: connected; the lane owns it.
        tls: over `incoming` and `outgoing`, handshake done.
        allowed: kinds that the peer may send.
    """

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        allowed: frozenset[Kind],
    ) -> None:
        sock.setblocking(False)
        self.ended = False
        self._records_sent = self._records_received = 0
        self._sock, self._tls, self._incoming, self._outgoing = sock, tls, incoming, outgoing
        self.allowed = allowed
        self._lock = threading.Lock()
        self._raw = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._spare: list[bytearray] = []
        self._buffer = bytearray(BUFFER_BYTES)
        self._filled = 0
        self._header: Header | None = None

    def fileno(self) -> int:
        """-1 once closed."""
        return self._sock.fileno()

    def peer_certificate(self) -> bytes:
        """The peer's certificate, DER."""
        certificate = self._tls.getpeercert(binary_form=True)
        assert certificate is not None, "both ends ask for a certificate"
        return certificate

    @property
    def records(self) -> int:
        """TLS records so far in the direction that had more, about; beyond MAX_RECORDS the lane ends."""
        return max(self._records_sent, self._records_received)

    @property
    def unsent_bytes(self) -> int:
        """Encrypted bytes that the kernel has not taken yet: wait until the socket is writable, then `flush`."""
        return self._unsent_bytes

    def send(self, frame: Parts) -> None:
        """Send one frame. Never blocks; what does not fit now waits for `flush`.

        Raises:
            WorkerLost: the connection is broken, or the peer has stopped reading.
        """
        with self._lock:
            self._check()
            try:
                if frame.nbytes <= BUFFER_BYTES:
                    # One record and one system call: copying the parts together costs far less than either.
                    self._write(b"".join(frame.parts))  # type: ignore[arg-type]  # numpy arrays have the buffer protocol
                else:
                    self._write_in_pieces(frame)
            except OSError as error:
                raise self._broken(error) from error

    def flush(self) -> None:
        """Go on sending what was left; WorkerLost as in `send`."""
        with self._lock:
            self._check()
            try:
                self._flush()
            except OSError as error:
                raise self._broken(error) from error

    def receive(self) -> list[Frame]:
        """The frames that are complete by now; empty when nothing is. Never blocks. `release` each after use.

        Raises:
            WorkerLost: the peer closed the connection or it broke.
            WireError: what came is no frame.
        """
        with self._lock:
            self._check()
            try:
                if not self._incoming.pending:  # something can be left of the handshake
                    count = self._sock.recv_into(self._raw)
                    if count == 0:
                        self.ended = True
                        raise WorkerLost("the other side closed the lane")
                    self._records_received += count >> 14
                    self._incoming.write(self._raw[:count])
                frames = self._frames()
                self._records_received += len(frames)
                return frames
            except (BlockingIOError, InterruptedError):
                return []
            except OSError as error:
                raise self._broken(error) from error
            except WireError:
                self.ended = True
                raise

    def release(self, frame: Frame) -> None:
        """The frame's memory may be used again: what views its payload is worthless from now on."""
        if len(frame.buffer) == BUFFER_BYTES and len(self._spare) < SPARE_BUFFERS:
            self._spare.append(frame.buffer)

    def wait_for_frame(self, deadline: float) -> Frame:
        """Block until one frame is there, when nothing else is expected: for openings and pings.

        Raises:
            WorkerTimeout: `deadline` (time.monotonic) passed. Otherwise as `receive`.
        """
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        frames = self.receive() if self._incoming.pending else []  # what came with the handshake
        while not frames:
            _wait(poller, deadline)
            frames = self.receive()
        if len(frames) > 1:
            raise WireError(f"{len(frames)} frames came where one was due")
        return frames[0]

    def interrupt(self) -> None:
        """End the connection without giving the descriptor back: whoever waits for the socket sees its end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection. A thread that waits for the socket is woken."""
        with self._lock:
            self.ended = True
            self._unsent.clear()
            self._unsent_bytes = 0
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    # with the lock held ---------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.ended:
            raise WorkerLost("the lane has ended")
        if self.records > MAX_RECORDS:
            self.ended = True
            self.interrupt()  # whoever reads takes the lane out
            raise WorkerLost("the lane's keys are used up")

    def _broken(self, error: OSError) -> WorkerLost:
        self.ended = True
        return WorkerLost(f"the lane broke ({error.strerror or error})")

    def _write_in_pieces(self, frame: Parts) -> None:
        for part in frame.parts:
            view = memoryview(part).cast("B")  # type: ignore[arg-type]  # as above
            for begin in range(0, len(view), WRITE_BYTES):
                self._write(view[begin : begin + WRITE_BYTES])

    def _write(self, data: bytes | memoryview) -> None:
        self._tls.write(data)
        self._records_sent += 1 + (len(data) >> 14)
        self._flush()

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data and not self._unsent:
            sent = self._push(data)
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
        if data:
            self._unsent_bytes += len(data)
            if self._unsent_bytes > MAX_UNSENT_BYTES:
                self.ended = True
                self.interrupt()
                raise WorkerLost("the other side of the lane has stopped reading")
            self._unsent.append(memoryview(data))
        while self._unsent:
            first = self._unsent[0]
            sent = self._push(first)
            self._unsent_bytes -= sent
            if sent < len(first):
                self._unsent[0] = first[sent:]
                return
            self._unsent.popleft()

    def _push(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def _frames(self) -> list[Frame]:
        frames: list[Frame] = []
        tls, incoming = self._tls, self._incoming
        while incoming.pending or tls.pending():
            try:
                space = memoryview(self._buffer)[self._filled :]
                count = int(tls.read(len(space), space))  # a number, since there is a buffer
            except ssl.SSLWantReadError:
                break
            if not count:
                raise ssl.SSLZeroReturnError(0, "closed by the other side")
            self._filled += count
            self._take_frames(frames)
        if self._outgoing.pending:  # TLS itself had something to say
            self._flush()
        return frames

    def _take_frames(self, frames: list[Frame]) -> None:
        while self._filled >= HEADER_BYTES:
            header = self._header or parse_header(self._buffer, self.allowed)
            self._header = header
            total = HEADER_BYTES + header.length
            if total > len(self._buffer):
                larger = bytearray(total)
                larger[: self._filled] = memoryview(self._buffer)[: self._filled]
                self._buffer = larger
            if self._filled < total:
                return
            whole = self._buffer
            self._buffer = self._spare.pop() if self._spare else bytearray(BUFFER_BYTES)
            rest = self._filled - total
            if rest:  # less than a buffer: a larger one ends with its frame
                self._buffer[:rest] = memoryview(whole)[total : self._filled]
            self._filled, self._header = rest, None
            frames.append(Frame(header, memoryview(whole)[HEADER_BYTES:total], whole))


def connect(
    host: str, port: int, context: ssl.SSLContext, server_name: str, allowed: frozenset[Kind], deadline: float
) -> LaneSocket:
    """Open a TCP connection and bring the TLS handshake to its end.

    Raises:
        OSError: refused, no route, a failed handshake (ssl.SSLError).
        WorkerTimeout: `deadline` (time.monotonic) passed.
    """
    sock = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
    return _handshake(sock, context, allowed, deadline, server_side=False, server_name=server_name)


def accept(sock: socket.socket, context: ssl.SSLContext, allowed: frozenset[Kind], deadline: float) -> LaneSocket:
    """The server's side of `connect`; owns `sock` from the call on. Raises as `connect` does."""
    return _handshake(sock, context, allowed, deadline, server_side=True, server_name=None)


def set_options(sock: socket.socket) -> None:
    """No Nagle; a peer that vanished is noticed after 25 s without traffic. Buffer sizes are left to the kernel,
    which adapts them as long as nobody sets them."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        option = getattr(socket, name, None)  # names differ between Linux and macOS
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _handshake(
    sock: socket.socket,
    context: ssl.SSLContext,
    allowed: frozenset[Kind],
    deadline: float,
    *,
    server_side: bool,
    server_name: str | None,
) -> LaneSocket:
    try:
        set_options(sock)
        sock.setblocking(False)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=server_side, server_hostname=server_name)
        poller = select.poll()
        poller.register(sock.fileno(), select.POLLIN)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                _push_all(sock, outgoing, deadline)
                _wait(poller, deadline)
                data = sock.recv(RECEIVE_BYTES)
                if not data:
                    raise ConnectionResetError("closed during the handshake") from None
                incoming.write(data)
            except ssl.SSLError:
                with contextlib.suppress(OSError, WorkerTimeout):
                    _push_all(sock, outgoing, min(deadline, time.monotonic() + 1))  # the alert
                raise
        _push_all(sock, outgoing, deadline)
    except BaseException:
        sock.close()
        raise
    return LaneSocket(sock, tls, incoming, outgoing, allowed)


def _push_all(sock: socket.socket, outgoing: ssl.MemoryBIO, deadline: float) -> None:
    data = memoryview(outgoing.read())
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            poller = select.poll()
            poller.register(sock.fileno(), select.POLLOUT)
            _wait(poller, deadline)


def _wait(poller: select.poll, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0 or not poller.poll(max(1, int(left * 1000))):
        raise WorkerTimeout("the other side of the lane did not answer in time")
