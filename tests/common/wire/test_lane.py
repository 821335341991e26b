"""Frames over real TLS sockets: in pieces, in bursts, too large, changed on the way, and after the end.

Run: .venv/bin/pytest tests/common/wire/test_lane.py
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from fixtures.certificates import Cluster, make_cluster

from titan.common.errors import TitanError, WireError, WorkerLost, WorkerTimeout
from titan.common.security import Role
from titan.common.security.identity import tls_name
from titan.common.security.tls import client_ssl_context, server_ssl_context
from titan.common.wire import lane as lane_module
from titan.common.wire.frames import HEADER_BYTES, Kind, Parts, pack, whole
from titan.common.wire.lane import BUFFER_BYTES, Frame, LaneSocket, accept, connect

ANY = frozenset(Kind)
DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    made = make_cluster(tmp_path_factory.mktemp("certs"))
    made.member("worker")
    made.member("coordinator", Role.COORDINATOR)
    return made


@pytest.fixture
def contexts(cluster: Cluster) -> tuple:
    return (
        server_ssl_context(cluster.member("worker")),
        client_ssl_context(cluster.member("coordinator", Role.COORDINATOR)),
    )


def open_pair(contexts: tuple, middle: int | None = None) -> tuple[LaneSocket, LaneSocket]:
    """Worker's and coordinator's end; through the port `middle` when there is something between them."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return _open(contexts, listener, port if middle is None else middle)


def _open(contexts: tuple, listener: socket.socket, port: int) -> tuple[LaneSocket, LaneSocket]:
    ends: list[LaneSocket] = []
    deadline = time.monotonic() + DEADLINE_S

    def serve() -> None:
        sock, _ = listener.accept()
        ends.append(accept(sock, contexts[0], ANY, deadline))

    thread = threading.Thread(target=serve)
    thread.start()
    client = connect("127.0.0.1", port, contexts[1], tls_name("worker", Role.WORKER), ANY, deadline)
    thread.join(DEADLINE_S)
    listener.close()
    return ends[0], client


@pytest.fixture
def pair(contexts: tuple) -> Iterator[tuple[LaneSocket, LaneSocket]]:
    ends = open_pair(contexts)
    yield ends
    for end in ends:
        end.close()


def result(request_id: int, payload: bytes) -> Parts:
    header = pack(Kind.RESULT, length=len(payload), request_id=request_id)
    return Parts((header, payload), len(header) + len(payload))


def receive(lane: LaneSocket, count: int, sender: LaneSocket | None = None) -> list[tuple[int, bytes]]:
    """The next `count` frames; whatever the sender could not send at once is sent meanwhile."""
    found: list[tuple[int, bytes]] = []
    deadline = time.monotonic() + DEADLINE_S
    poller = select.poll()
    poller.register(lane.fileno(), select.POLLIN)
    while len(found) < count:
        assert time.monotonic() < deadline
        if sender is not None and sender.unsent_bytes:
            sender.flush()
        poller.poll(5)
        for frame in lane.receive():
            found.append((frame.header.request_id, bytes(frame.payload)))
            lane.release(frame)
    return found


@pytest.mark.parametrize("size", [0, 1, 4096, 16384 - HEADER_BYTES, 16384, 65536, BUFFER_BYTES, 1 << 20, 9 << 20])
def test_frames_of_every_size(pair: tuple[LaneSocket, LaneSocket], size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    for sender, receiver in (pair, pair[::-1]):
        sender.send(result(7, payload))
        assert receive(receiver, 1, sender) == [(7, payload)]


def test_a_burst_arrives_in_order_and_nothing_is_left(pair: tuple[LaneSocket, LaneSocket]) -> None:
    sender, receiver = pair
    expected = [(n, bytes([n % 251]) * (n * 37 % 5000)) for n in range(300)]
    for number, payload in expected:
        sender.send(result(number, payload))
    assert receive(receiver, 300, sender) == expected
    assert receiver.receive() == []


def test_buffers_are_used_again(pair: tuple[LaneSocket, LaneSocket]) -> None:
    sender, receiver = pair
    seen: set[int] = set()
    for number in range(40):
        sender.send(result(number, b"x" * 8192))
        frames: list[Frame] = []
        while not frames:
            frames = receiver.receive()
        seen.add(id(frames[0].buffer))
        receiver.release(frames[0])
    assert len(seen) <= 2


def test_a_peer_that_does_not_read_is_cut_off(
    pair: tuple[LaneSocket, LaneSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "MAX_UNSENT_BYTES", 1 << 20)
    sender, _ = pair

    def send_on() -> None:
        for number in range(100):
            sender.send(result(number, b"x" * (1 << 20)))

    with pytest.raises(WorkerLost, match="stopped reading"):
        send_on()


def test_the_end_is_told_once_and_then_always(pair: tuple[LaneSocket, LaneSocket]) -> None:
    sender, receiver = pair
    sender.send(result(1, b"last"))
    sender.close()
    assert receive(receiver, 1) == [(1, b"last")]
    for _ in range(2):
        with pytest.raises(WorkerLost):
            _until_error(receiver)
    with pytest.raises(WorkerLost):
        receiver.send(result(2, b""))
    assert sender.fileno() == -1


def _until_error(lane: LaneSocket) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        lane.receive()


@pytest.mark.parametrize(
    "bad",
    [
        b"\x00" * HEADER_BYTES,
        b"GET / HTTP/1.1\r\nHost: titan.example.internal\r\n\r\n",
        pack(Kind.RESULT, length=0xFFFFFFFF),
        pack(Kind.EXECUTE, rows=0xFFFFFFFF),
    ],
)
def test_what_is_no_frame_ends_the_connection(pair: tuple[LaneSocket, LaneSocket], bad: bytes) -> None:
    sender, receiver = pair
    sender.send(whole(bad))
    with pytest.raises(WireError):
        _until_error(receiver)
    with pytest.raises(WorkerLost):
        receiver.receive()


def test_a_large_frame_is_not_allocated_before_it_is_allowed(pair: tuple[LaneSocket, LaneSocket]) -> None:
    sender, receiver = pair
    receiver.allowed = frozenset({Kind.OPEN})
    sender.send(whole(pack(Kind.OPEN, length=1 << 20)))
    with pytest.raises(WireError, match="more than allowed"):
        _until_error(receiver)


class Middle:
    """Something between the two ends that passes bytes on, changed as `spoil` says."""

    def __init__(self, target: int) -> None:
        self.spoil = False
        self.chunk = 65536
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = target
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        inner, _ = self._listener.accept()
        outer = socket.create_connection(("127.0.0.1", self._target))
        self._sockets = [inner, outer]
        for source, sink in ((inner, outer), (outer, inner)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(self.chunk):
                if self.spoil:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                sink.sendall(data)
        except OSError:
            pass
        sink.close()

    def close(self) -> None:
        self._listener.close()
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def mediated(contexts: tuple) -> Iterator[tuple[LaneSocket, LaneSocket, Middle]]:
    listener = socket.create_server(("127.0.0.1", 0))
    middle = Middle(listener.getsockname()[1])
    server, client = _open(contexts, listener, middle.port)
    yield server, client, middle
    server.close()
    client.close()
    middle.close()


def test_frames_in_tiny_pieces(mediated: tuple[LaneSocket, LaneSocket, Middle]) -> None:
    server, client, middle = mediated
    middle.chunk = 7
    client.send(result(1, b"a" * 3000))
    client.send(result(2, b"b" * 50))
    assert receive(server, 2) == [(1, b"a" * 3000), (2, b"b" * 50)]


def test_a_flipped_bit_is_caught_by_tls(mediated: tuple[LaneSocket, LaneSocket, Middle]) -> None:
    server, client, middle = mediated
    client.send(result(1, b"a"))
    assert receive(server, 1) == [(1, b"a")]
    middle.spoil = True
    client.send(result(2, b"b" * 4000))
    with pytest.raises(WorkerLost, match=r"(?i)broke"):
        _until_error(server)


def test_a_handshake_that_stands_still_has_a_deadline(contexts: tuple) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(WorkerTimeout):
        connect("127.0.0.1", silent.getsockname()[1], contexts[1], "worker", ANY, time.monotonic() + 0.1)


def test_another_workers_certificate_is_refused(contexts: tuple) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    outcome: list[Exception] = []

    def serve() -> None:
        sock, _ = listener.accept()
        try:
            accept(sock, contexts[0], ANY, time.monotonic() + DEADLINE_S)
        except (OSError, TitanError) as error:
            outcome.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(OSError, match=r"(?i)hostname"):
        connect(
            "127.0.0.1",
            listener.getsockname()[1],
            contexts[1],
            tls_name("other", Role.WORKER),
            ANY,
            time.monotonic() + DEADLINE_S,
        )
    thread.join(DEADLINE_S)
    listener.close()
    assert outcome
