"""Each way an address can fail, on real sockets. Run: `.venv/bin/pytest tests/common/config/test_probe.py`."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import grpc
import psutil
import pytest
from fixtures.certificates import DEADLINE_S, Cluster, make_cluster, serve, tls_echo

from titan.common.config import Worker
from titan.common.config import probe as probe_module
from titan.common.config.probe import ProbeResult, probe_tls
from titan.common.security import Credentials, Role, grpc_server_credentials, server_ssl_context


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return make_cluster(tmp_path_factory.mktemp("probe") / "certs")


@pytest.fixture(scope="module")
def coordinator(cluster: Cluster) -> Credentials:
    return cluster.member("coordinator", Role.COORDINATOR, [])


@pytest.fixture(scope="module")
def mini(cluster: Cluster) -> Credentials:
    return cluster.member("mini")


def _probe(address: str, credentials: Credentials, *, name: str = "mini", timeout_s: float = DEADLINE_S) -> ProbeResult:
    worker = Worker(name=name, addresses=(address,))
    return probe_tls(worker, worker.addresses[0], credentials, timeout_s=timeout_s)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_grpc_worker_is_recognised(coordinator: Credentials, mini: Credentials) -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_secure_port("127.0.0.1:0", grpc_server_credentials(mini))
        server.start()
        try:
            result = _probe(f"localhost:{port}", coordinator)
        finally:
            server.stop(None).wait(DEADLINE_S)
    assert (result.status, result.cause, result.peer) == ("ok", "", mini.identity)
    assert result.ok
    assert result.seconds > 0


def test_nothing_listens(coordinator: Credentials) -> None:
    port = _free_port()
    result = _probe(f"127.0.0.1:{port}", coordinator)
    assert result.status == "refused"
    assert result.cause == f"127.0.0.1 is there, but nothing listens on port {port}"
    assert "Start titan-worker" in result.mend


def test_the_name_is_unknown(coordinator: Credentials) -> None:
    result = _probe("no-such-host.invalid:7077", coordinator)
    assert result.status == "name_unknown"
    assert "no-such-host.invalid is not known" in result.cause


def test_nobody_answers(coordinator: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:  # connects, and then says nothing
        result = _probe(f"127.0.0.1:{silent.getsockname()[1]}", coordinator, timeout_s=0.2)
    assert result.status == "timed_out"
    assert "within 200 ms" in result.cause


def test_a_resolver_that_hangs_is_left_alone(coordinator: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        release.wait(DEADLINE_S)
        return []

    monkeypatch.setattr(probe_module.socket, "getaddrinfo", hang)
    try:
        result = _probe("mini.local:7077", coordinator, timeout_s=0.2)
    finally:
        release.set()
    assert result.status == "timed_out"
    assert "looking up mini.local" in result.cause


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_there_is_no_route(coordinator: Credentials, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    class NoRoute(socket.socket):
        def connect(self, _: object) -> None:
            raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(probe_module.socket, "socket", NoRoute)
    monkeypatch.setattr(probe_module.sys, "platform", system)
    result = _probe("127.0.0.1:7077", coordinator)
    assert result.status == "unreachable"
    assert "No route to host" in result.cause
    assert ("Local Network" in result.mend) == (system == "darwin")


def test_the_second_ip_address_of_a_name_is_tried(
    coordinator: Credentials, mini: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = _free_port()
    with serve(tls_echo(server_ssl_context(mini))) as server:

        def two_addresses(*_: object, **__: object) -> list[object]:
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, ("127.0.0.1", refusing)), (*kind, ("127.0.0.1", server.port))]

        monkeypatch.setattr(probe_module.socket, "getaddrinfo", two_addresses)
        assert _probe("localhost:7077", coordinator).ok


def _answer_http(plain: socket.socket) -> None:
    plain.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    ("handle", "status", "cause"),
    [
        (_answer_http, "tls_failed", "does not speak TLS"),
        (lambda plain: None, "tls_failed", "closed the connection"),
    ],
)
def test_the_port_belongs_to_another_program(
    coordinator: Credentials, handle: Callable[[socket.socket], None], status: str, cause: str
) -> None:
    with serve(handle) as server:
        result = _probe(server.address, coordinator)
    assert result.status == status
    assert cause in result.cause


def test_the_worker_is_of_another_cluster(coordinator: Credentials, tmp_path_factory: pytest.TempPathFactory) -> None:
    foreign = make_cluster(tmp_path_factory.mktemp("foreign") / "certs").member("mini")
    with serve(tls_echo(server_ssl_context(foreign))) as server:
        result = _probe(server.address, coordinator)
    assert result.status == "tls_failed"
    assert "not issued by this cluster" in result.cause


def test_the_worker_does_not_accept_us(
    coordinator: Credentials, mini: Credentials, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A server that trusts another authority: in TLS 1.3 the client learns it only after its own handshake is done."""
    other = make_cluster(tmp_path_factory.mktemp("other") / "certs")
    context = server_ssl_context(other.member("mini"))
    context.load_cert_chain(mini.cert_path, mini.key_path)
    with serve(tls_echo(context)) as server:
        result = _probe(server.address, coordinator)
    assert result.status == "tls_failed"
    assert "does not accept this machine's certificate" in result.cause
    assert result.peer == mini.identity


def test_the_workers_certificate_has_expired(cluster: Cluster, coordinator: Credentials) -> None:
    old = cluster.member("old", days=1, now=datetime.now(UTC) - timedelta(days=3))
    with serve(tls_echo(server_ssl_context(old))) as server:
        result = _probe(server.address, coordinator, name="old")
    assert result.status == "tls_failed"
    assert "has expired" in result.cause


def test_somebody_else_answers(cluster: Cluster, coordinator: Credentials, mini: Credentials) -> None:
    with serve(tls_echo(server_ssl_context(mini))) as server:
        result = _probe(server.address, coordinator, name="studio")
    assert result.status == "wrong_name"
    assert "answered as worker mini, but hosts.yaml calls it studio" in result.cause
    desk = cluster.member("mini", Role.COORDINATOR)
    with serve(tls_echo(server_ssl_context(desk))) as server:
        result = _probe(server.address, coordinator)
    assert result.status == "wrong_role"
    assert "coordinator mini, which is not a worker" in result.cause
    cluster.member("mini")


def test_the_certificate_lacks_the_address(cluster: Cluster, coordinator: Credentials) -> None:
    moved = cluster.member("moved", hosts=["moved.local"])
    with serve(tls_echo(server_ssl_context(moved))) as server:
        result = _probe(server.address, coordinator, name="moved")
    assert result.status == "wrong_host"
    assert "good for moved.local, not for 127.0.0.1" in result.cause
    assert "--host 127.0.0.1" in result.mend


def test_no_probe_leaves_a_descriptor(coordinator: Credentials) -> None:
    process, port = psutil.Process(), _free_port()
    _probe(f"127.0.0.1:{port}", coordinator)
    before = process.num_fds()
    for _ in range(20):
        _probe(f"127.0.0.1:{port}", coordinator)
    deadline = time.monotonic() + DEADLINE_S
    while process.num_fds() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.num_fds() <= before
