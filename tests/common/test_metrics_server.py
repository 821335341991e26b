"""/metrics of a daemon: who gets it, and who keeps nobody from it.

Run: .venv/bin/pytest tests/common/test_metrics_server.py
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.certificates import DEADLINE_S, Cluster, make_cluster

from titan.common import metrics_server
from titan.common.errors import AddressInUse
from titan.common.metrics import CollectorRegistry, Figures, Sample, Tally, metrics_text
from titan.common.metrics_server import MAX_CONNECTIONS, MetricsServer
from titan.common.security import Role, server_ssl_context
from titan.common.security.identity import parse_identity, require_role, tls_name
from titan.common.security.tls import client_ssl_context

tally = Tally("kind")
tally.add("x", by=3)
registry = CollectorRegistry()
registry.register(Figures(lambda: [Sample("titan_a", "gauge", "A.", 1.5), *tally.samples("titan_things", "Things.")]))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return make_cluster(tmp_path_factory.mktemp("certs"))


@contextlib.contextmanager
def serving(cluster: Cluster, host: str = "127.0.0.1") -> Iterator[MetricsServer]:
    context = server_ssl_context(cluster.member("mini"))
    server = MetricsServer(
        host,
        0,
        lambda: metrics_text(registry),
        context,
        lambda der: require_role(parse_identity(der), Role.COORDINATOR, Role.OPERATOR),
    )
    try:
        yield server
    finally:
        server.close()


def port_of(server: MetricsServer) -> int:
    return int(server.address.rpartition(":")[2])


def get(server: MetricsServer, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=DEADLINE_S)
    try:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def test_this_machine_gets_the_figures_and_a_web_page_does_not(cluster: Cluster) -> None:
    with serving(cluster) as server:
        assert server.url == f"http://{server.address}/metrics"
        status, text = get(server)
        assert status == 200
        assert 'titan_things_total{kind="x"} 3.0' in text
        assert get(server, "/metrics?x=1") == (200, text)
        assert get(server, Host=f"localhost:{port_of(server)}") == (200, text)
        assert get(server, Host="evil.example")[0] == 403  # DNS rebinding
        assert get(server, Origin="http://evil.example")[0] == 403
        assert get(server, "/")[0] == 404
        assert get(server, method="POST")[0] == 405
        with pytest.raises(AddressInUse, match="--metrics"):
            MetricsServer("127.0.0.1", port_of(server), bytes, server_ssl_context(cluster.member("mini")), print)


def test_slow_and_noisy_peers_are_cut_and_keep_nobody_out(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(cluster) as server, contextlib.ExitStack() as stack:
        target = ("127.0.0.1", port_of(server))
        idle = [stack.enter_context(socket.create_connection(target, DEADLINE_S)) for _ in range(MAX_CONNECTIONS + 4)]
        assert get(server)[0] == 200
        assert len(server._door) <= MAX_CONNECTIONS
        assert idle[0].recv(1) == b""  # the first made room
        monkeypatch.setattr(metrics_server, "ANSWER_S", 0.3)
        slow = stack.enter_context(socket.create_connection(target, DEADLINE_S))
        end = time.monotonic() + DEADLINE_S
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:  # a byte at a time, as long as it is taken
                slow.sendall(b"G")
                slow.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    assert slow.recv(1) == b""
                    break
        assert time.monotonic() < end
        long = stack.enter_context(socket.create_connection(target, DEADLINE_S))
        with contextlib.suppress(ConnectionError):
            long.sendall(b"GET /metrics HTTP/1.1\r\n" + b"x" * 20_000)
            assert long.recv(1) == b""
        assert get(server)[0] == 200


def test_off_loopback_only_the_cluster_may_look(cluster: Cluster, tmp_path: Path) -> None:
    stranger = make_cluster(tmp_path / "other").member("me", Role.OPERATOR, [])
    stranger_context = client_ssl_context(cluster.member("me2", Role.OPERATOR, []))
    stranger_context.load_cert_chain(stranger.cert_path, stranger.key_path)
    with serving(cluster, "0.0.0.0") as server:
        assert server.url.startswith("https://0.0.0.0:")

        def ask(context: ssl.SSLContext) -> bytes:
            with (
                socket.create_connection(("127.0.0.1", port_of(server)), DEADLINE_S) as plain,
                context.wrap_socket(plain, server_hostname=tls_name("mini", Role.WORKER)) as secure,
            ):
                secure.sendall(b"GET /metrics HTTP/1.1\r\nHost: mini:9177\r\n\r\n")
                answer = b""
                with contextlib.suppress(ConnectionError):
                    while part := secure.recv(65536):
                        answer += part
                return answer

        for name, role in (("coordinator", Role.COORDINATOR), ("grafana", Role.OPERATOR)):
            assert b"titan_things_total" in ask(client_ssl_context(cluster.member(name, role, [])))
        assert ask(client_ssl_context(cluster.member("maxi"))) == b""  # another worker
        with pytest.raises(OSError, match=r"(?i)alert|EOF|reset|pipe"):
            ask(stranger_context)
        with socket.create_connection(("127.0.0.1", port_of(server)), DEADLINE_S) as plain:
            plain.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"titan" not in plain.recv(65536)
