"""Everybody who has no business with a worker, against a real worker process: an alert, an end, and nothing else.

Each test ends with the same question: does the worker still serve its coordinator?
Run: .venv/bin/pytest tests/cluster/test_strangers.py
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from fixtures.certificates import Cluster, make_cluster

from titan.common.config.probe_status import ask_status
from titan.common.errors import TitanError
from titan.common.security import Credentials, Role, client_ssl_context
from titan.common.security.authority import init_authority, issue
from titan.common.security.channel import LIMITS
from titan.common.security.credentials import load_credentials_dir
from titan.common.security.revoke import revoke
from titan.common.security.tls import channel_options, grpc_channel_credentials, server_ssl_context
from titan.coordinator.demo.processes import WorkerProcess
from titan.proto.titan.v1 import trust_pb2, trust_pb2_grpc, worker_pb2_grpc
from titan.proto.titan.v1 import worker_pb2 as pb

DEADLINE_S = 20.0
CUT_S = 15.0  # three times the bound that the worker sets
ALERT = 0x15


class Target:
    """A worker process, its cluster, and its coordinator's certificate."""

    def __init__(self, cluster: Cluster, process: WorkerProcess) -> None:
        self.cluster, self.process = cluster, process
        self.address = process.address
        self.coordinator = load_credentials_dir(cluster.folder, role=Role.COORDINATOR, name="coordinator")
        entry = next(line for line in process.log if line.get("message") == "listening")
        self.ports = {"grpc": int(self.address.rpartition(":")[2]), "lane": int(entry["lane_port"])}

    def connect(self, port: str) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.ports[port]), DEADLINE_S)

    def check_it_serves(self) -> None:
        """The coordinator gets its answer, and a stranger's noise has ended nothing."""
        assert self.process.process.poll() is None
        reply = ask_status("mini", self.address, self.coordinator, connect_s=DEADLINE_S, status_s=DEADLINE_S)
        assert reply.state == "ready"
        with (
            self.connect("lane") as plain,
            client_ssl_context(self.coordinator).wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            assert secure.version() == "TLSv1.3"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    cluster = make_cluster(tmp_path_factory.mktemp("strangers") / "certs")
    cluster.member("mini")
    cluster.member("coordinator", Role.COORDINATOR, [])
    with WorkerProcess("mini", cluster.folder, 64 << 20) as process:
        process.wait_until_listening()
        yield Target(cluster, process)


def said(connection: socket.socket) -> bytes:
    """Everything the other side says until it ends the connection; fails when it does not."""
    connection.settimeout(DEADLINE_S)
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65_536):
            data += part
    return data


def is_alert_or_nothing(data: bytes) -> bool:
    """Whether these bytes are no more than one TLS alert (level and description in the clear)."""
    return data == b"" or (data[0] == ALERT and len(data) == 7)


def tls_says(plain: socket.socket, context: ssl.SSLContext) -> str:
    """Shake hands and wait for the other side to speak; the alert's words, or the end. Fails on any application data.

    In TLS 1.3 a client is through before the server has seen its certificate, so reading is part of it.
    """
    try:
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            secure.settimeout(DEADLINE_S)
            data = secure.recv(1)
            assert data == b"", "the worker spoke to a stranger"
            return "closed"
    except ssl.SSLError as error:
        return str(error)
    except ConnectionError as error:
        return type(error).__name__


def context_of(credentials: Credentials | None, cluster: Cluster) -> ssl.SSLContext:
    """A client that trusts `cluster` and shows what it has."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=cluster.authority_pem.decode())
    if credentials is not None:
        context.load_cert_chain(credentials.cert_path, credentials.key_path)
    return context


@pytest.mark.parametrize("port", ["grpc", "lane"])
@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", id="plaintext HTTP/2"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: mini\r\n\r\n", id="plaintext HTTP/1"),
        pytest.param(random.Random(7).randbytes(4096), id="garbage"),
        pytest.param(b"\x16\x03\x01\xff\xff" + bytes(65_535), id="a record that is too long"),
        pytest.param(
            b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(16_380) + (b"\x16\x03\x01\x40\x00" + bytes(16_384)) * 64,
            id="a ClientHello of 16 MiB",
        ),
    ],
)
def test_noise(target: Target, port: str, noise: bytes) -> None:
    with target.connect(port) as plain:
        with contextlib.suppress(ConnectionError):
            plain.sendall(noise)
        assert is_alert_or_nothing(said(plain))
    target.check_it_serves()


def _another_cluster(target: Target, folder: Path) -> Credentials:
    authority = init_authority(folder / "other")
    issue(authority, "coordinator", role=Role.COORDINATOR)
    return load_credentials_dir(folder / "other", role=Role.COORDINATOR)


def _self_signed(target: Target, folder: Path) -> Credentials:
    """The cluster's own name and identity, signed by nobody but itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    real = x509.load_pem_x509_certificate(target.coordinator.cert_pem)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(real.subject)
        .issuer_name(real.subject)
        .public_key(key.public_key())
        .serial_number(real.serial_number)
        .not_valid_before(real.not_valid_before_utc)
        .not_valid_after(real.not_valid_after_utc)
    )
    for extension in real.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    cert_path, key_path = folder / "self.pem", folder / "self.key"
    cert_path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    old = target.coordinator
    return Credentials(old.identity, old.ca_path, cert_path, key_path, b"", b"", b"")


def _expired(target: Target, folder: Path) -> Credentials:
    past = datetime.now(UTC) - timedelta(days=5)
    return target.cluster.member("expired", Role.COORDINATOR, [], days=1, now=past)


def _early(target: Target, folder: Path) -> Credentials:
    return target.cluster.member("early", Role.COORDINATOR, [], now=datetime.now(UTC) + timedelta(days=1))


def _no_certificate(target: Target, folder: Path) -> None:
    return None


@pytest.mark.parametrize("port", ["grpc", "lane"])
@pytest.mark.parametrize("who", [_no_certificate, _another_cluster, _self_signed, _expired, _early])
def test_a_certificate_that_does_not_count(
    target: Target, tmp_path: Path, port: str, who: Callable[[Target, Path], Credentials | None]
) -> None:
    credentials = who(target, tmp_path)
    words = tls_says(target.connect(port), context_of(credentials, target.cluster))
    assert "alert" in words.lower() or words in ("closed", "ConnectionResetError"), words
    if port == "lane":  # OpenSSL says what is wrong; gRPC's BoringSSL may just end it
        assert "alert" in words.lower(), words
    target.check_it_serves()


@pytest.mark.parametrize("port", ["grpc", "lane"])
@pytest.mark.parametrize("version", ["TLSv1_1", "TLSv1_2"])
def test_old_tls_even_with_a_good_certificate(target: Target, port: str, version: str) -> None:
    context = context_of(target.coordinator, target.cluster)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    words = tls_says(target.connect(port), context)
    assert "ALERT_" in words or "EOF" in words, words
    target.check_it_serves()


@contextlib.contextmanager
def grpc_channel(target: Target, credentials: Credentials) -> Iterator[grpc.Channel]:
    options = [*LIMITS, *channel_options("mini")]
    with grpc.secure_channel(target.address, grpc_channel_credentials(credentials), options) as channel:
        yield channel


def refusal(call: Callable[..., object], request: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call(request, timeout=DEADLINE_S)
    assert isinstance(refused.value, grpc.Call)
    return refused.value.code(), refused.value.details() or ""


def commands(channel: grpc.Channel, *without: type) -> list[tuple[Callable[..., object], object]]:
    """Everything that can be asked of a worker but Status, and what takes a request of the types `without`."""
    worker, trust = worker_pb2_grpc.WorkerStub(channel), trust_pb2_grpc.TrustStub(channel)

    def stream(method: Callable[..., Iterator[object]], request: object) -> Callable[..., object]:
        return lambda _request, timeout: list(method(iter([request]), timeout=timeout))

    everything: list[tuple[Callable[..., object], object]] = [
        (worker.Hello, pb.HelloRequest()),
        (stream(worker.Assign, pb.AssignRequest()), None),
        (stream(worker.Execute, pb.ExecuteRequest()), None),
        (worker.Prefetch, pb.PrefetchRequest()),
        (worker.Probe, pb.ProbeRequest()),
        (worker.OpenLane, pb.OpenLaneRequest()),
        (worker.Drain, pb.DrainRequest()),
        (trust.Describe, trust_pb2.DescribeRequest()),
        (trust.SyncRevocations, trust_pb2.SyncRevocationsRequest()),
        (trust.NewKey, trust_pb2.NewKeyRequest()),
        (trust.InstallCertificate, trust_pb2.InstallCertificateRequest()),
    ]
    return [(call, request) for call, request in everything if not isinstance(request, without)]


def test_another_worker_may_do_nothing_and_an_operator_may_look(target: Target) -> None:
    other = target.cluster.member("other")
    operator = target.cluster.member("me", Role.OPERATOR, [])
    with grpc_channel(target, other) as channel:
        for call, request in [*commands(channel), (worker_pb2_grpc.WorkerStub(channel).Status, pb.StatusRequest())]:
            code, words = refusal(call, request)
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "other has a certificate for the role worker" in words
    with grpc_channel(target, operator) as channel:
        for call, request in commands(channel, trust_pb2.SyncRevocationsRequest):
            assert refusal(call, request)[0] is grpc.StatusCode.PERMISSION_DENIED
        assert worker_pb2_grpc.WorkerStub(channel).Status(pb.StatusRequest(), timeout=DEADLINE_S).state == "ready"
        sync = trust_pb2_grpc.TrustStub(channel).SyncRevocations
        assert sync(trust_pb2.SyncRevocationsRequest(), timeout=DEADLINE_S).number == 0
    target.check_it_serves()


def test_a_revoked_certificate(target: Target) -> None:
    gone = target.cluster.member("gone", Role.COORDINATOR, [])
    with grpc_channel(target, gone) as channel:
        status = worker_pb2_grpc.WorkerStub(channel).Status
        assert status(pb.StatusRequest(), timeout=DEADLINE_S).state == "ready"
        revoke(target.cluster.authority, "gone")  # into the folder that the worker looks at
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                status(pb.StatusRequest(), timeout=DEADLINE_S)
            except grpc.RpcError:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for call, request in [*commands(channel), (status, pb.StatusRequest())]:
            code, words = refusal(call, request)
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert "was revoked" in words
    words = tls_says(target.connect("lane"), context_of(gone, target.cluster))
    assert "REVOKED" in words
    target.check_it_serves()


@pytest.mark.parametrize("port", ["grpc", "lane"])
def test_a_peer_that_trickles_is_cut(target: Target, port: str) -> None:
    """A ClientHello whose bytes come one by one."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500)
    with target.connect(port) as plain:
        plain.settimeout(0.1)
        end = time.monotonic() + CUT_S
        for byte in hello:
            assert time.monotonic() < end, "the connection is still open"
            try:
                plain.sendall(bytes([byte]))
                if plain.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("the whole ClientHello was waited for")
    target.check_it_serves()


@pytest.mark.parametrize("port", ["grpc", "lane"])
def test_two_hundred_idle_connections_keep_nobody_out(target: Target, port: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(target.connect(port))
        deadline = time.monotonic() + CUT_S
        while True:
            try:
                target.check_it_serves()
                break
            except (OSError, TitanError):  # the lane turns peers away while many are at its door
                assert time.monotonic() < deadline
                time.sleep(0.1)
    target.check_it_serves()


@pytest.mark.parametrize("token", ["made up", "of another peer", "used twice"])
def test_a_lane_needs_its_own_token(target: Target, token: str) -> None:
    from fixtures.lanes import hello_for_lane, open_lane_with

    hello = hello_for_lane(target.address, target.coordinator)
    peer = target.coordinator
    if token == "made up":
        hello.lane_token = os.urandom(len(hello.lane_token))
    elif token == "of another peer":
        peer = target.cluster.member("second", Role.COORDINATOR, [])
    else:
        open_lane_with(target.address, hello, peer).close()
    with pytest.raises(TitanError, match="token is not valid"):
        open_lane_with(target.address, hello, peer)
    target.check_it_serves()


def test_a_worker_of_another_cluster_is_not_taken_for_ours(target: Target, tmp_path: Path) -> None:
    """The other way round: the coordinator tells a stranger who answers nothing."""
    authority = init_authority(tmp_path / "other")
    issue(authority, "mini", role=Role.WORKER, hosts=["localhost"])
    stranger = load_credentials_dir(tmp_path / "other", role=Role.WORKER)
    from fixtures.certificates import serve, tls_echo

    with serve(tls_echo(server_ssl_context(stranger))) as server:
        with pytest.raises(TitanError, match="not issued by this cluster"):
            ask_status("mini", server.address, target.coordinator, connect_s=DEADLINE_S, status_s=DEADLINE_S)
        server.finish()
    assert isinstance(server.outcomes[0], OSError)
    target.check_it_serves()
