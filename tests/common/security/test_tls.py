"""Real handshakes on loopback. Run: `.venv/bin/pytest tests/common/security/test_tls.py`."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fixtures.certificates import DEADLINE_S, Cluster, Served, make_cluster, serve, tls_echo

from titan.common.errors import CertificateInvalid, WorkerUnreachable
from titan.common.security import (
    Credentials,
    Role,
    client_ssl_context,
    explain_tls_failure,
    server_ssl_context,
)

V = ssl.TLSVersion


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return make_cluster(tmp_path_factory.mktemp("tls") / "certs")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return make_cluster(tmp_path_factory.mktemp("other") / "certs")


@pytest.fixture(scope="module")
def mini(cluster: Cluster) -> Credentials:
    return cluster.member("mini", hosts=["localhost"])


@pytest.fixture(scope="module")
def coordinator(cluster: Cluster) -> Credentials:
    return cluster.member("coordinator", Role.COORDINATOR, [])


@pytest.fixture
def server(mini: Credentials) -> Iterator[Served]:
    with serve(tls_echo(server_ssl_context(mini))) as served:
        yield served


def _talk(context: ssl.SSLContext, port: int, host: str | None = "localhost") -> bytes:
    """The byte that the server sends when it has accepted us."""
    with (
        socket.create_connection(("127.0.0.1", port), DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        received = secure.recv(1)
        if not received:
            raise ConnectionResetError("EOF")
        secure.sendall(b"hello")
        return received


def _refusal(context: ssl.SSLContext, port: int) -> OSError:
    """How the connection ended that should not have come about."""
    try:
        _talk(context, port)
    except OSError as error:
        return error
    pytest.fail("the connection was accepted")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "mini.worker.titan.internal"])
def test_members_of_a_cluster_talk_in_tls_13(server: Served, coordinator: Credentials, host: str) -> None:
    assert _talk(client_ssl_context(coordinator), server.port, host) == b"!"
    server.finish()
    assert server.outcomes == [(b"hello", "TLSv1.3")]


@pytest.mark.parametrize(
    "host", ["127.0.0.2", "mini.local", "mini.coordinator.titan.internal", "studio.worker.titan.internal"]
)
def test_a_host_that_the_certificate_lacks_is_refused(server: Served, coordinator: Credentials, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        _talk(client_ssl_context(coordinator), server.port, host)


def test_a_client_of_another_cluster_is_refused(server: Served, cluster: Cluster, other: Cluster) -> None:
    context = client_ssl_context(other.member("coordinator", Role.COORDINATOR, []))
    context.load_verify_locations(cluster.folder / "ca.pem")  # an attacker trusts whom he likes
    error = _refusal(context, server.port)
    assert "does not accept this machine's certificate" in str(explain_tls_failure("localhost:1", error))
    server.finish()
    assert isinstance(server.outcomes[0], ssl.SSLCertVerificationError)


def test_a_server_of_another_cluster_is_refused(coordinator: Credentials, other: Cluster) -> None:
    foreign = server_ssl_context(other.member("mini", hosts=["localhost"]))
    with serve(tls_echo(foreign)) as server, pytest.raises(ssl.SSLCertVerificationError) as caught:
        _talk(client_ssl_context(coordinator), server.port)
    assert "not issued by this cluster" in str(explain_tls_failure("mini.local:7077", caught.value))


def test_a_client_without_a_certificate_gets_an_alert(server: Served, cluster: Cluster) -> None:
    context = ssl.create_default_context(cafile=str(cluster.folder / "ca.pem"))
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED") as caught:
        _talk(context, server.port)
    assert "does not accept this machine's certificate" in str(explain_tls_failure("localhost:1", caught.value))


def _expired(cluster: Cluster, name: str, role: Role) -> Credentials:
    return cluster.member(name, role, ["localhost"], days=1, now=datetime.now(UTC) - timedelta(days=3))


def test_an_expired_client_is_refused(server: Served, cluster: Cluster) -> None:
    with pytest.raises(OSError, match="CERTIFICATE_EXPIRED") as caught:
        _talk(client_ssl_context(_expired(cluster, "old", Role.COORDINATOR)), server.port)
    assert "this machine's certificate has expired" in str(explain_tls_failure("localhost:1", caught.value))


def test_an_expired_server_is_refused(cluster: Cluster, coordinator: Credentials) -> None:
    old = _expired(cluster, "oldmini", Role.WORKER)
    with serve(tls_echo(server_ssl_context(old))) as server, pytest.raises(ssl.SSLError) as caught:
        _talk(client_ssl_context(coordinator), server.port)
    assert "at localhost:1 has expired" in str(explain_tls_failure("localhost:1", caught.value))
    named = explain_tls_failure("localhost:1", caught.value, peer=old.identity)
    assert f"worker oldmini at localhost:1 expired on {old.identity.not_after:%Y-%m-%d}" in str(named)


def test_an_operator_cannot_pose_as_a_server(cluster: Cluster, coordinator: Credentials) -> None:
    operator = cluster.member("op", Role.OPERATOR, ["localhost"])
    with serve(tls_echo(server_ssl_context(operator))) as server, pytest.raises(ssl.SSLCertVerificationError):
        _talk(client_ssl_context(coordinator), server.port)


@pytest.mark.parametrize("newest", [V.TLSv1_2, V.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_an_old_tls_client_is_refused_even_with_a_certificate(
    server: Served, coordinator: Credentials, newest: ssl.TLSVersion
) -> None:
    context = client_ssl_context(coordinator)
    context.minimum_version = V.MINIMUM_SUPPORTED
    context.maximum_version = newest
    with pytest.raises(OSError, match=r"(?i)protocol|no_ciphers"):
        _talk(context, server.port)
    server.finish()
    assert isinstance(server.outcomes[0], OSError)


def test_an_old_tls_server_is_refused(mini: Credentials, coordinator: Credentials) -> None:
    context = server_ssl_context(mini)
    context.minimum_version = V.MINIMUM_SUPPORTED
    context.maximum_version = V.TLSv1_2
    with serve(tls_echo(context)) as server:
        error = _refusal(client_ssl_context(coordinator), server.port)
    assert "does not speak TLS 1.3" in str(explain_tls_failure("localhost:1", error))


def test_a_plaintext_server_is_told_apart(coordinator: Credentials) -> None:
    with serve(lambda plain: plain.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")) as server:
        error = _refusal(client_ssl_context(coordinator), server.port)
    assert "does not speak TLS:" in str(explain_tls_failure("localhost:1", error))


def test_a_plaintext_client_gets_an_alert_and_nothing_else(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        received = b""
        try:
            while chunk := plain.recv(100):
                received += chunk
        except ConnectionResetError:
            pass
    assert received in (b"", b"\x15\x03\x01\x00\x02\x02\x46") or received[:1] == b"\x15"
    assert len(received) <= 7


def test_a_certificate_for_other_hosts_names_them(mini: Credentials) -> None:
    error = explain_tls_failure("10.0.0.9:7077", "Hostname Verification Check failed", peer=mini.identity)
    assert isinstance(error, WorkerUnreachable)
    assert "worker mini, whose certificate is good for localhost, 127.0.0.1, ::1, not for 10.0.0.9" in str(error)
    assert "--host 10.0.0.9" in error.mend


@pytest.mark.parametrize(
    ("details", "sentence"),
    [
        ("ipv4:10.0.0.2:7077: Failed to connect to remote host: Connection refused", "nothing listens at"),
        ("UNAVAILABLE: ipv4:10.0.0.2:7077: Socket closed", "closed the connection during the TLS handshake"),
        ("WRONG_VERSION_NUMBER: Invalid certificate verification context", "does not speak TLS"),
        ("something {new} and unheard of", "failed (something {new} and unheard of)"),
    ],
)
def test_grpc_details_are_explained(details: str, sentence: str) -> None:
    assert sentence in str(explain_tls_failure("10.0.0.2:7077", details))


def test_a_certificate_that_vanished_is_named(cluster: Cluster) -> None:
    gone = cluster.member("gone")
    Path(gone.key_path).unlink()
    with pytest.raises(CertificateInvalid, match=r"gone\.pem"):
        server_ssl_context(gone)
