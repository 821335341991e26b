"""The worker's lanes: who gets one, what ends one, and what several of them share.

Run: .venv/bin/pytest tests/worker/test_lane_server.py
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fixtures.certificates import make_cluster
from fixtures.checkpoints import make_checkpoint
from fixtures.worker_server import DEADLINE_S, NAME, RunningWorker, running_worker, wait_until

from titan.common.errors import ClusterError, SessionUnknown, WorkerDraining, WorkerLost, WorkerUnreachable
from titan.common.security import Role
from titan.common.security.identity import tls_name
from titan.common.security.tls import client_ssl_context
from titan.common.wire.frames import HEADER_BYTES, Kind, encode_execute, pack, whole
from titan.common.wire.lane import LaneSocket, connect
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.coordinator.remote.connection import Connection
from titan.coordinator.remote.exchange import Exchange
from titan.coordinator.remote.lane_transport import LaneTransport, open_lane
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.worker.lane import listener as listener_module
from titan.worker.lane import tokens as tokens_module

ANY = frozenset(Kind)
TIMES = ReplyTimes(DEADLINE_S, 0.0)
HIDDEN = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "mini"
    make_checkpoint(path, layers=2, experts=8, hidden=HIDDEN, width=64)
    return path


@pytest.fixture
def worker(tmp_path: Path, model: Path) -> Iterator[RunningWorker]:
    with running_worker(tmp_path / "certs", model) as running:
        yield running


@pytest.fixture
def connection(worker: RunningWorker) -> Iterator[Connection]:
    opened = worker.connect("instance-1")
    yield opened
    opened.close()


def call_of(request_id: int, *, layer: int = 0, rows: int = 1) -> ExecuteCall:
    rng = np.random.default_rng(request_id)
    pairs = np.arange(2 * rows, dtype=np.uint32)
    x = rng.standard_normal((rows, HIDDEN), np.float32)
    return ExecuteCall(request_id, layer, x, pairs // 2, pairs % 8, False, DEADLINE_S)


def ask(transport: LaneTransport, call: ExecuteCall) -> np.ndarray | ClusterError:
    exchange = Exchange()
    outputs: list[np.ndarray] = []
    exchange.send(transport, call, np.arange(call.pair_rows.size), TIMES)
    failed = exchange.collect(lambda _, result: outputs.append(result.outputs.copy()))
    return failed[0].error if failed else outputs[0]


def raw_lane(worker: RunningWorker, context: ssl.SSLContext | None = None) -> LaneSocket:
    """A TLS connection to the lane's port on which nothing has been said."""
    context = context or client_ssl_context(worker.credentials)
    deadline = time.monotonic() + DEADLINE_S
    return connect("127.0.0.1", worker.server.lane_port, context, tls_name(NAME, Role.WORKER), ANY, deadline)


def answer_to(lane: LaneSocket, said: bytes) -> Kind | None:
    """What the worker answers first; None when it closes the connection without a word."""
    lane.send(whole(said))
    try:
        return Kind(lane.wait_for_frame(time.monotonic() + DEADLINE_S).header.kind)
    except WorkerLost:
        return None
    finally:
        lane.close()


def test_a_token_opens_one_lane(worker: RunningWorker, connection: Connection) -> None:
    lane = worker.lane(connection)
    assert isinstance(ask(lane, call_of(1)), np.ndarray)
    with pytest.raises(SessionUnknown):
        worker.lane(connection)
    assert isinstance(ask(lane, call_of(2)), np.ndarray)
    lane.close()
    wait_until(lambda: worker.service.execution.lane_counts.refused == 1, "counting the refusal")


def test_a_token_expires(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "TOKEN_LIFE_S", 0.0)
    connection = worker.connect("instance-1")
    with pytest.raises(SessionUnknown):
        worker.lane(connection)
    connection.close()


def test_a_token_is_of_no_use_to_another_certificate(worker: RunningWorker, connection: Connection) -> None:
    other = client_ssl_context(worker.cluster.member("second", Role.COORDINATOR))
    with pytest.raises(SessionUnknown):
        open_lane(connection.address, connection.hello, other, NAME, worker.dtype, DEADLINE_S)
    with pytest.raises(SessionUnknown):  # and is used up by the try
        worker.lane(connection)


def test_a_worker_or_operator_gets_no_lane(worker: RunningWorker, connection: Connection) -> None:
    opening = pack(Kind.OPEN, length=32) + connection.hello.lane_token
    for role in (Role.WORKER, Role.OPERATOR):
        lane = raw_lane(worker, client_ssl_context(worker.cluster.member(f"a-{role}", role)))
        assert answer_to(lane, opening) is Kind.FAILURE
    worker.lane(connection).close()  # the token was not even looked at


@pytest.mark.parametrize(
    "said",
    [
        pack(Kind.OPEN, length=32) + bytes(32),
        pack(Kind.OPEN, length=4) + bytes(4),
        pack(Kind.OPEN, length=0),
    ],
)
def test_a_wrong_token_is_refused_with_a_word(worker: RunningWorker, said: bytes) -> None:
    assert answer_to(raw_lane(worker), said) is Kind.FAILURE


@pytest.mark.parametrize(
    "said",
    [
        pack(Kind.OPEN, length=1 << 20),
        pack(Kind.PING, length=4) + b"ping",
        b"".join(bytes(part) for part in encode_execute(call_of(1), 1, "float32").parts),
        b"\x16\x03\x01" + bytes(HEADER_BYTES),
    ],
)
def test_whoever_says_something_else_first_gets_no_lane(worker: RunningWorker, said: bytes) -> None:
    assert answer_to(raw_lane(worker), said) in (None, Kind.FAILURE)
    wait_until(lambda: worker.service.execution.lane_counts.refused == 1, "counting the refusal")
    assert worker.service.execution.lane_counts.open == 0


def test_a_stranger_gets_an_alert_and_plaintext_gets_nothing(worker: RunningWorker, tmp_path: Path) -> None:
    foreign = make_cluster(tmp_path / "foreign").member("coordinator", Role.COORDINATOR)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(foreign.cert_path, foreign.key_path)
    with pytest.raises(OSError, match=r"(?i)alert"):
        converse(worker.server.lane_port, context)
    with socket.create_connection(("127.0.0.1", worker.server.lane_port), timeout=DEADLINE_S) as plain:
        plain.sendall(pack(Kind.OPEN, length=32) + bytes(32))
        assert len(plain.recv(4096)) <= 64  # an alert at most
    wait_until(lambda: worker.service.execution.lane_counts.refused == 2, "counting the refusals")


def converse(port: int, context: ssl.SSLContext) -> bytes:
    """What a server says to whoever shakes hands with it."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain, context.wrap_socket(plain) as tls:
        return tls.recv(1)


def test_those_who_say_nothing_are_shut_out_in_time_and_keep_nobody_waiting(
    worker: RunningWorker, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "OPEN_TIMEOUT_S", 0.3)
    silent = [socket.create_connection(("127.0.0.1", worker.server.lane_port)) for _ in range(40)]
    handshaken = raw_lane(worker)
    lane = worker.lane(connection)
    assert isinstance(ask(lane, call_of(1)), np.ndarray)
    wait_until(lambda: worker.service.execution.lane_counts.refused == 41, "shutting out those who say nothing")
    lane.close()
    handshaken.close()
    for sock in silent:
        sock.close()


@pytest.mark.parametrize(
    "bad",
    [pack(Kind.EXECUTE, length=0xFFFFFFFF), pack(Kind.OPEN, length=0), pack(Kind.RESULT), bytes(HEADER_BYTES)],
    ids=["huge", "open again", "a result", "zeros"],
)
def test_a_malformed_frame_ends_that_lane_only(worker: RunningWorker, connection: Connection, bad: bytes) -> None:
    other = worker.connect_as("second", "instance-2")
    good = other.lane
    lane = worker.lane(connection)
    lane._lane.send(whole(bad))
    assert isinstance(ask(lane, call_of(1)), WorkerLost)
    counts = worker.service.execution.lane_counts
    wait_until(lambda: counts.malformed == 1 and counts.open == 1, "ending the lane")
    assert isinstance(ask(good, call_of(2)), np.ndarray)
    status = connection.stub.Status(pb.StatusRequest(), timeout=DEADLINE_S)
    assert (status.malformed_frames, status.lanes) == (1, 1)
    lane.close()
    good.close()
    other.connection.close()


def test_a_new_session_ends_the_lanes_of_the_old(worker: RunningWorker, connection: Connection) -> None:
    lane = worker.lane(connection)
    assert isinstance(ask(lane, call_of(1)), np.ndarray)
    again = worker.connect("instance-1")
    wait_until(lambda: worker.service.execution.lane_counts.open == 0, "ending the old lane")
    assert isinstance(ask(lane, call_of(2)), WorkerLost)
    fresh = worker.lane(again)
    assert isinstance(ask(fresh, call_of(3)), np.ndarray)
    lane.close()
    fresh.close()
    again.close()


def test_a_request_of_another_epoch_is_refused(worker: RunningWorker, connection: Connection) -> None:
    lane = worker.lane(connection)
    lane._epoch += 1
    lane._lane.send(encode_execute(call_of(1), lane._epoch, worker.dtype))
    deadline = time.monotonic() + DEADLINE_S
    frame = lane._lane.wait_for_frame(deadline)
    assert frame.header.kind == Kind.FAILURE
    assert bytes(frame.payload).startswith(b"session_unknown\0")
    lane.close()


def test_requests_that_wait_together_share_a_kernel_and_get_their_own_answers(worker: RunningWorker) -> None:
    lanes = [worker.connect_as(f"coordinator-{n}", f"instance-{n}") for n in range(4)]
    calls = [call_of(n + 1, rows=n + 1) for n in range(4)]
    alone = [ask(member.lane, call) for member, call in zip(lanes, calls, strict=True)]
    before = worker.mlx.requests.merged
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert release.wait(DEADLINE_S)

    job = worker.mlx.submit(hold)
    assert held.wait(DEADLINE_S)
    exchange = Exchange()
    for member, call in zip(lanes, calls, strict=True):
        exchange.send(member.lane, call, np.arange(call.pair_rows.size), TIMES)
    wait_until(lambda: len(worker.mlx.requests) == 4, "reading the requests while the thread is busy")
    release.set()
    job.result(DEADLINE_S)
    together: dict[int, np.ndarray] = {}

    def take(_: object, result: ExecuteResult) -> None:
        together[result.request_id] = result.outputs.copy()

    assert not exchange.collect(take)
    assert worker.mlx.requests.merged == before + 4
    for call, expected in zip(calls, alone, strict=True):
        assert isinstance(expected, np.ndarray)
        np.testing.assert_array_equal(together[call.request_id], expected)
    for member in lanes:
        member.lane.close()
        member.connection.close()


def test_draining_answers_what_was_sent_and_says_so(worker: RunningWorker, connection: Connection) -> None:
    lane = worker.lane(connection)
    assert isinstance(ask(lane, call_of(1)), np.ndarray)
    ending = threading.Thread(target=worker.close)
    ending.start()
    wait_until(lambda: worker.service.draining, "draining")
    deadline, request_id = time.monotonic() + DEADLINE_S, 1
    while lane.leaving is None:  # what crosses the announcement is answered
        assert time.monotonic() < deadline
        request_id += 1
        assert isinstance(ask(lane, call_of(request_id)), np.ndarray), "a request under way was lost"
    assert isinstance(lane.leaving, WorkerDraining)
    lane.close()
    ending.join(DEADLINE_S)
    assert not ending.is_alive()
    with pytest.raises((WorkerUnreachable, WorkerLost)):
        raw(lambda: worker.lane(connection))


def raw(act: Callable[[], object]) -> None:
    """Refused connections come as OSError where nothing explains them."""
    try:
        act()
    except OSError as error:
        raise WorkerUnreachable(str(error)) from error


def test_nothing_is_left_behind(tmp_path: Path, model: Path) -> None:
    before = set(threading.enumerate())
    with running_worker(tmp_path / "certs", model) as worker:
        connection = worker.connect("instance-1")
        lane = worker.lane(connection)
        assert isinstance(ask(lane, call_of(1)), np.ndarray)
        connection.close()
        lane.close()
    wait_until(
        lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("titan-")], "ending threads"
    )


def test_a_fault_in_one_batch_does_not_end_the_worker(worker: RunningWorker, connection: Connection) -> None:
    lane = worker.lane(connection)
    holdings = worker.service.execution._execute
    worker.mlx.serve(lambda calls: [])  # an answer too few: what follows it breaks
    assert isinstance(ask(lane, call_of(1)._replace(deadline_s=0.3)), ClusterError)
    worker.mlx.serve(holdings)
    assert isinstance(ask(lane, call_of(2)), np.ndarray)
    lane.close()
