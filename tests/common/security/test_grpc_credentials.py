"""gRPC over certificates of a cluster. Run: `.venv/bin/pytest tests/common/security/test_grpc_credentials.py`."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from fixtures.certificates import DEADLINE_S, Cluster, make_cluster, serve

from titan.common.errors import CertificateInvalid
from titan.common.security import (
    Credentials,
    Role,
    channel_options,
    client_ssl_context,
    explain_tls_failure,
    grpc_channel_credentials,
    grpc_server_credentials,
    peer_identity,
)

METHOD = "/titan.test/Echo"
AuthContext = dict[str, Any]


class _Echo(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self.contexts: list[AuthContext] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.contexts.append({key: list(values) for key, values in context.auth_context().items()})
        return request


@contextmanager
def _server(credentials: Credentials) -> Iterator[tuple[int, _Echo]]:
    echo = _Echo()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((echo,))
        port = server.add_secure_port("127.0.0.1:0", grpc_server_credentials(credentials))
        server.start()
        try:
            yield port, echo
        finally:
            server.stop(None).wait(DEADLINE_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return make_cluster(tmp_path_factory.mktemp("grpc") / "certs")


@pytest.fixture(scope="module")
def coordinator(cluster: Cluster) -> Credentials:
    return cluster.member("coordinator", Role.COORDINATOR, [])


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[tuple[int, _Echo]]:
    with _server(cluster.member("mini", hosts=["localhost"])) as running:
        yield running


def _call(target: str, credentials: grpc.ChannelCredentials, options: list[tuple[str, str]] | None = None) -> bytes:
    with grpc.secure_channel(target, credentials, options=options) as channel:
        return channel.unary_unary(METHOD)(b"x", timeout=DEADLINE_S)


def _failure(call: Callable[[], bytes]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    return caught.value.details()  # type: ignore[attr-defined]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_coordinator_is_known_to_the_worker(worker: tuple[int, _Echo], coordinator: Credentials, host: str) -> None:
    port, echo = worker
    assert _call(f"{host}:{port}", grpc_channel_credentials(coordinator)) == b"x"
    assert peer_identity(echo.contexts[-1]) == coordinator.identity


def test_a_worker_can_be_checked_by_name_instead_of_host(cluster: Cluster, coordinator: Credentials) -> None:
    channel = grpc_channel_credentials(coordinator)
    with _server(cluster.member("moved", hosts=["10.9.9.9"])) as (port, _):
        target = f"127.0.0.1:{port}"
        assert "not good for 127.0.0.1" in str(explain_tls_failure(target, _failure(lambda: _call(target, channel))))
        assert _call(target, channel, channel_options("moved")) == b"x"
        assert "Hostname" in _failure(lambda: _call(target, channel, channel_options("studio")))


def test_strangers_are_refused(
    worker: tuple[int, _Echo], cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    port, echo = worker
    target, before = f"127.0.0.1:{port}", len(echo.contexts)
    foreign = make_cluster(tmp_path_factory.mktemp("foreign") / "certs").member("coordinator", Role.COORDINATOR)
    details = _failure(lambda: _call(target, grpc_channel_credentials(foreign)))
    assert "not issued by this cluster" in str(explain_tls_failure(target, details))
    trusting = grpc.ssl_channel_credentials(cluster.authority_pem, foreign.key_pem, foreign.cert_pem)
    _failure(lambda: _call(target, trusting))
    _failure(lambda: _call(target, grpc.ssl_channel_credentials(cluster.authority_pem)))
    with grpc.insecure_channel(target) as plain:
        _failure(lambda: plain.unary_unary(METHOD)(b"x", timeout=DEADLINE_S))
    assert len(echo.contexts) == before


def test_a_plaintext_peer_is_told_apart(coordinator: Credentials) -> None:
    with serve(lambda plain: plain.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")) as server:
        details = _failure(lambda: _call(server.address, grpc_channel_credentials(coordinator)))
    assert "does not speak TLS" in str(explain_tls_failure(server.address, details))


def test_peer_identity_refuses_what_is_not_a_member_in_tls_13(
    worker: tuple[int, _Echo], coordinator: Credentials
) -> None:
    port, echo = worker
    _call(f"127.0.0.1:{port}", grpc_channel_credentials(coordinator))
    good = echo.contexts[-1]
    with pytest.raises(CertificateInvalid, match="no certificate"):
        peer_identity({})
    with pytest.raises(CertificateInvalid, match=r"TLSv1\.2.*TLS 1\.3"):
        peer_identity({**good, "ssl_tls_version": [b"TLSv1.2"]})
    with pytest.raises(CertificateInvalid, match="unknown version"):
        peer_identity({key: value for key, value in good.items() if key != "ssl_tls_version"})
    with pytest.raises(CertificateInvalid, match="cannot be read"):
        peer_identity({**good, "x509_pem_cert": [b"nonsense"]})
    with pytest.raises(CertificateInvalid, match="no certificate"):
        peer_identity({**good, "x509_pem_cert": good["x509_pem_cert"] * 2})


SERVER = """
import sys
from titan.common.security import Role, grpc_server_credentials, load_credentials_dir, prepare_grpc
assert prepare_grpc()
from concurrent.futures import ThreadPoolExecutor
import grpc
assert not prepare_grpc()
server = grpc.server(ThreadPoolExecutor(1))
credentials = load_credentials_dir(sys.argv[1], role=Role.WORKER, name="strict")
print(server.add_secure_port("127.0.0.1:0", grpc_server_credentials(credentials)), flush=True)
server.start()
sys.stdin.read()
server.stop(None).wait()
"""


def _handshake(port: int, credentials: Credentials, version: ssl.TLSVersion) -> str | None:
    context = client_ssl_context(credentials)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        return secure.version()


def test_grpc_in_this_process_still_takes_tls_12(worker: tuple[int, _Echo], coordinator: Credentials) -> None:
    """Why `peer_identity` looks at the version: when this fails, gRPC has changed and tls.py can be simplified."""
    assert _handshake(worker[0], coordinator, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"


def test_a_process_can_leave_grpc_no_tls_12(cluster: Cluster, coordinator: Credentials) -> None:
    cluster.member("strict")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(cluster.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            assert _handshake(port, coordinator, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
            with pytest.raises(OSError, match=r"(?i)eof|handshake|reset"):
                _handshake(port, coordinator, ssl.TLSVersion.TLSv1_2)
        finally:
            process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
