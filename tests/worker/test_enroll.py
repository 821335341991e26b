"""Enrolment: both ends over real TLS, and everybody who has no business there.

Run: `.venv/bin/pytest tests/worker/test_enroll.py`.
"""

from __future__ import annotations

import base64
import contextlib
import re
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.certificates import DEADLINE_S, Cluster, make_cluster

from titan.common.errors import (
    CertificateInvalid,
    ConfigError,
    EnrolmentRefused,
    KeyExists,
    SecurityError,
    WorkerTimeout,
    WorkerUnreachable,
)
from titan.common.security import Role, enrolment, load_credentials_dir, server_ssl_context
from titan.common.security.codes import ALPHABET, new_code, parse_code, show_code
from titan.common.security.identity import Identity
from titan.common.security.ledger import issued
from titan.common.security.request import check_answer, new_request, read_request
from titan.common.security.revoke import revoke
from titan.coordinator.enroll import Wish, enroll
from titan.proto.titan.v1 import trust_pb2 as pb
from titan.worker import enroll as worker_enroll
from titan.worker.enroll import Enrolment, listen


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return make_cluster(tmp_path / "desk")


class Waiting:
    """A worker that waits for its certificate, in a thread."""

    def __init__(self, folder: Path, name: str | None = "mini", **bounds: float) -> None:
        self.folder = folder
        self.words: list[str] = []
        self.identity: Identity | None = None
        self.stopping = threading.Event()
        self.listener = listen("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.enrolment = Enrolment(self.listener, folder, name, self.words.append, **bounds)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.identity = self.enrolment.wait(self.stopping)

    @property
    def code(self) -> str:
        """The newest code that was shown."""
        until(lambda: bool(self.codes()))
        return self.codes()[-1]

    def codes(self) -> list[str]:
        return [found[1] for words in self.words if (found := re.search(r"tries\): (\S+)$", words))]

    def finish(self) -> Identity | None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        return self.identity

    def connect(self) -> ssl.SSLSocket:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols([enrolment.ALPN])
        return context.wrap_socket(socket.create_connection(("127.0.0.1", int(self.address[10:])), DEADLINE_S))


@contextlib.contextmanager
def waiting(folder: Path, name: str | None = "mini", **bounds: float) -> Iterator[Waiting]:
    worker = Waiting(folder, name, **bounds)
    try:
        yield worker
    finally:
        worker.stopping.set()
        worker.finish()
        worker.listener.close()


def until(condition: object, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def ended(connection: socket.socket) -> bool:
    """Whether the other side closes the connection, in one way or another, without a further word."""
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def wrong(code: str) -> str:
    """A well-formed code that is another one."""
    while (other := new_code()) == code:
        pass
    return other


def test_a_worker_becomes_a_member_and_its_key_stays_with_it(cluster: Cluster, tmp_path: Path) -> None:
    cluster.member("gone")
    known = revoke(cluster.authority, "gone").revocations
    there = tmp_path / "there" / "certs"
    with waiting(there, None) as worker:
        enrolled = enroll(worker.address, worker.code.lower(), cluster.authority, Wish("mini", ("mini.local",)))
        assert worker.finish() == enrolled.identity
    assert set(enrolled.identity.hosts) == {"127.0.0.1", "mini.local", "localhost", "::1"}
    credentials = load_credentials_dir(there, role=Role.WORKER)
    assert credentials.identity == enrolled.identity
    assert (there / "revoked.pem").read_bytes() == known.pem
    assert {p.name: stat.S_IMODE(p.stat().st_mode) for p in there.iterdir()} == {
        "ca.pem": 0o644,
        "mini.key": 0o600,
        "mini.pem": 0o644,
        "revoked.pem": 0o644,
    }
    assert stat.S_IMODE(there.stat().st_mode) == 0o700
    # The coordinator's machine has the certificate, knows that it signed it, and never had the key.
    assert enrolled.cert_path.read_bytes() == credentials.cert_pem
    assert issued(cluster.folder, cluster.authority.cluster, "mini")[0] == enrolled.identity
    assert not (cluster.folder / "mini.key").exists()
    server_ssl_context(credentials)  # and TLS takes it


def test_three_wrong_tries_end_a_code_and_a_typo_costs_none(cluster: Cluster, tmp_path: Path) -> None:
    with waiting(tmp_path / "there") as worker:
        first = worker.code
        slip = first[:-1] + ALPHABET[(ALPHABET.index(first[-1]) + 1) % 32]
        with pytest.raises(EnrolmentRefused, match="mistake in it"):
            enroll(worker.address, slip, cluster.authority, Wish())
        for left in ("2 tries are left", "1 tries are left", "shows a new one"):
            with pytest.raises(EnrolmentRefused, match=left):
                enroll(worker.address, wrong(first), cluster.authority, Wish())
        until(lambda: len(worker.codes()) == 2)
        assert any("is used up" in words for words in worker.words)
        with pytest.raises(EnrolmentRefused, match="code is wrong"):
            enroll(worker.address, first, cluster.authority, Wish())  # the old one is worth nothing
        assert enroll(worker.address, worker.code, cluster.authority, Wish()).identity.name == "mini"


def test_a_code_ends_with_its_time(cluster: Cluster, tmp_path: Path) -> None:
    with waiting(tmp_path / "there", code_life_s=0.01) as worker:
        first = worker.code
        until(lambda: len(worker.codes()) > 1)
        with pytest.raises(EnrolmentRefused, match=r"code is wrong|not valid any more"):
            enroll(worker.address, first, cluster.authority, Wish())
    assert not (tmp_path / "there").exists()


def test_a_code_is_good_once(cluster: Cluster, tmp_path: Path) -> None:
    """A right proof uses the code up, also when nothing comes of it."""
    with waiting(tmp_path / "there") as worker:
        first = worker.code
        with pytest.raises(ConfigError, match="cannot be a certificate's name"):
            enroll(worker.address, first, cluster.authority, Wish(name="no_name"))
        until(lambda: len(worker.codes()) == 2)
        with pytest.raises(EnrolmentRefused, match="code is wrong"):
            enroll(worker.address, first, cluster.authority, Wish())


def test_who_does_not_know_the_code_gets_no_key_signed(cluster: Cluster, tmp_path: Path) -> None:
    """A man in the middle ends TLS himself: what each side proves is worth nothing to the other."""
    with waiting(tmp_path / "there") as worker, socket.create_server(("127.0.0.1", 0)) as trap:
        context, _ = worker_enroll._bootstrap_context()

        def relay() -> None:
            plain, _ = trap.accept()
            with context.wrap_socket(plain, server_side=True) as victim, worker.connect() as real:
                for source, target in ((real, victim), (victim, real), (real, victim)):
                    target.sendall(source.recv(65_536))

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(EnrolmentRefused, match="the code is wrong"):
            enroll(f"127.0.0.1:{trap.getsockname()[1]}", worker.code, cluster.authority, Wish())
        thread.join(DEADLINE_S)
    assert issued(cluster.folder, cluster.authority.cluster) == []


def test_an_impostor_without_the_code_is_found_out(cluster: Cluster) -> None:
    context, _ = worker_enroll._bootstrap_context()
    with socket.create_server(("127.0.0.1", 0)) as trap:

        def impostor() -> None:
            plain, _ = trap.accept()
            with context.wrap_socket(plain, server_side=True) as victim:
                deadline = time.monotonic() + DEADLINE_S
                enrolment.send(victim, pb.EnrolChallenge(version=1, nonce=enrolment.new_nonce()), deadline)
                enrolment.receive(victim, pb.EnrolProof, deadline)
                request = pb.EnrolRequest(mac=b"x" * 32, request_pem=new_request("mini").request_pem, name="mini")
                enrolment.send(victim, request, deadline)
                with contextlib.suppress(EnrolmentRefused, OSError):
                    enrolment.receive(victim, pb.EnrolGrant, deadline)

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(EnrolmentRefused, match="does not know the code"):
            enroll(f"127.0.0.1:{trap.getsockname()[1]}", new_code(), cluster.authority, Wish())
        thread.join(DEADLINE_S)
    assert issued(cluster.folder, cluster.authority.cluster) == []


@pytest.mark.parametrize("damage", ["mac", "ca", "certificate", "name"])
def test_a_worker_takes_no_certificate_that_is_not_its_own(cluster: Cluster, tmp_path: Path, damage: str) -> None:
    """Somebody who knows the code, but grants nonsense; nothing is written."""
    there = tmp_path / "there"
    stranger = make_cluster(tmp_path / "stranger")
    with waiting(there) as worker, worker.connect() as connection:
        deadline = time.monotonic() + DEADLINE_S
        challenge = enrolment.receive(connection, pb.EnrolChallenge, deadline)
        key = enrolment.derive_key(parse_code(worker.code), connection.getpeercert(binary_form=True) or b"")
        nonces = (challenge.nonce, enrolment.new_nonce())
        proof = pb.EnrolProof(nonce=nonces[1], mac=enrolment.prove(key, "coordinator", *nonces))
        enrolment.send(connection, proof, deadline)
        request = enrolment.receive(connection, pb.EnrolRequest, deadline)
        assert enrolment.proved(request.mac, key, "worker", *nonces, request.request_pem, b"mini")
        from cryptography.hazmat.primitives.serialization import Encoding

        from titan.common.security.authority import sign

        name = "other" if damage == "name" else "mini"
        public = read_request(request.request_pem, "mini")
        if damage == "certificate":
            public = new_request("x").key.public_key()
        cert = sign(cluster.authority, public, name, role=Role.WORKER, hosts=["a"]).public_bytes(Encoding.PEM)
        ca = stranger.authority_pem if damage == "ca" else cluster.authority_pem
        mac = b"x" * 32 if damage == "mac" else enrolment.prove(key, "grant", *nonces, ca, cert, b"")
        enrolment.send(connection, pb.EnrolGrant(mac=mac, ca_pem=ca, certificate_pem=cert), deadline)
        done = enrolment.receive(connection, pb.EnrolDone, deadline)
        assert done.refusal
        assert not done.mac
        until(lambda: len(worker.codes()) == 2)
        assert not there.exists() or not list(there.iterdir())


def test_names_that_are_taken(cluster: Cluster, tmp_path: Path) -> None:
    def attempt(folder: str, wish: Wish) -> str:
        with waiting(tmp_path / folder) as worker:
            return enroll(worker.address, worker.code, cluster.authority, wish).identity.name

    cluster.member("mini")  # issued by hand: its key lies there
    with pytest.raises(KeyExists, match=r"mini\.key"):
        attempt("a", Wish(replace=True))
    (cluster.folder / "mini.key").unlink()
    with pytest.raises(KeyExists, match="titan certs revoke mini"):
        attempt("b", Wish())
    assert attempt("c", Wish(replace=True)) == "mini"
    revoke(cluster.authority, "mini")
    assert attempt("d", Wish()) == "mini"
    with pytest.raises(EnrolmentRefused, match="same --name"):  # the worker was started with another name
        attempt("e", Wish(name="maxi"))


def test_a_worker_says_so_when_it_cannot_write(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with waiting(tmp_path / "file" / "certs") as worker:
        with pytest.raises(EnrolmentRefused, match="cannot be used as a folder"):
            enroll(worker.address, worker.code, cluster.authority, Wish())
        until(lambda: len(worker.codes()) == 2)


def test_strangers_keep_nobody_out(cluster: Cluster, tmp_path: Path) -> None:
    """Idle connections, garbage and slow peers, more of them than are let in at a time."""
    with waiting(tmp_path / "there") as worker, contextlib.ExitStack() as stack:
        target = ("127.0.0.1", int(worker.address[10:]))
        for _ in range(worker_enroll.MAX_PEERS + 8):
            stack.enter_context(socket.create_connection(target, DEADLINE_S))
        for noise in (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\xff\xff" + b"x" * 99,
        ):
            plain = stack.enter_context(socket.create_connection(target, DEADLINE_S))
            plain.sendall(noise)
        half = stack.enter_context(worker.connect())
        half.sendall(b"\x00\x00\x00")  # a length that never ends
        assert len(worker.enrolment._peers) <= worker_enroll.MAX_PEERS
        assert enroll(worker.address, worker.code, cluster.authority, Wish()).identity.name == "mini"


def test_a_peer_that_trickles_is_cut(tmp_path: Path) -> None:
    with waiting(tmp_path / "there", connection_s=0.3) as worker:
        with worker.connect() as slow:
            slow.settimeout(DEADLINE_S)
            slow.sendall(b"\x00")
            assert slow.recv(4096)  # the challenge
            assert ended(slow)
        with socket.create_connection(("127.0.0.1", int(worker.address[10:])), DEADLINE_S) as mute:
            assert ended(mute)  # no handshake came
        assert len(worker.codes()) == 1  # neither of them cost a try


def test_a_huge_message_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with waiting(tmp_path / "there") as worker, worker.connect() as connection:
        deadline = time.monotonic() + DEADLINE_S
        enrolment.receive(connection, pb.EnrolChallenge, deadline)
        connection.sendall(b"\xff\xff\xff\xff")
        with pytest.raises((EnrolmentRefused, OSError)):
            enrolment.receive(connection, pb.EnrolRequest, deadline)


def test_old_tls_is_refused(tmp_path: Path) -> None:
    with waiting(tmp_path / "there") as worker:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection(("127.0.0.1", int(worker.address[10:])), DEADLINE_S) as plain,
            pytest.raises(ssl.SSLError, match="ALERT_PROTOCOL_VERSION"),
        ):
            context.wrap_socket(plain)


def test_an_address_that_does_not_wait_for_enrolment(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises((WorkerTimeout, WorkerUnreachable)):
            enroll(address, new_code(), cluster.authority, Wish(), timeout_s=0.2)
    with pytest.raises(WorkerUnreachable, match="nothing listens"):
        enroll(address, new_code(), cluster.authority, Wish())


def test_codes() -> None:
    codes = {new_code() for _ in range(200)}
    assert len(codes) == 200
    for code in codes:
        assert re.fullmatch(r"([0-9A-HJKMNP-TV-Z]{5}-){3}[0-9A-HJKMNP-TV-Z]{5}", code)
        bare = code.replace("-", "")
        assert parse_code(code) == parse_code(bare.lower()) == parse_code(" " + bare[:7] + " " + bare[7:]) == bare
        assert parse_code(code.replace("0", "o").replace("1", "l")) == bare
        assert show_code(bare) == code
    for typed in ("", "ABC", "U" * 20, "é" * 20, "0" * 21, "9" * 10_000, "\x00" * 20):
        with pytest.raises(EnrolmentRefused):
            parse_code(typed)


def test_names_made_of_host_names() -> None:
    for words, name in {
        "Mini.local": "mini",
        "Anna's Mac mini": "anna-s-mac-mini",
        "-x-": "x",
        "": "worker",
        "日本": "worker",
        "a" * 80: "a" * 63,
    }.items():
        assert enrolment.suggested_name(words) == name


def test_requests_are_for_p256_keys_that_sign_them() -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    request = new_request("mini")
    assert read_request(request.request_pem, "mini") == request.key.public_key()
    other = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    p384 = other.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()).public_bytes(Encoding.PEM)
    for pem in (b"", b"noise", p384, b"x" * 20_000, request.request_pem[:-60]):
        with pytest.raises(CertificateInvalid):
            read_request(pem, "mini")
    with pytest.raises(SecurityError):
        check_answer(b"noise", b"noise", request, name=None)


def test_a_certificate_without_a_key_that_can_be_read(cluster: Cluster) -> None:
    """A point that is not on the curve; found by fuzzing."""
    der = base64.b64decode(b"".join(cluster.member("mini").cert_pem.splitlines()[1:-1]))
    at = der.index(b"\x03\x42\x00\x04") + 4
    damaged = der[:at] + bytes(64) + der[at + 64 :]
    with pytest.raises(CertificateInvalid, match="no key that can be read"):
        check_answer(damaged, cluster.authority_pem, new_request("mini"), name=None)
