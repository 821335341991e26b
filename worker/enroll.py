"""A worker without certificates: show a one-time code, and wait for `titan enroll` to bring a certificate.

Listens over TLS 1.3 with a certificate made for this purpose alone. Every wait has a deadline, few peers are let in at
a time and the one that has waited longest makes room, so that strangers keep nobody out. See common.security.enrolment.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from titan.common.config.address import join_address, split_address
from titan.common.errors import AddressInUse, EnrolmentRefused, TitanError
from titan.common.log import get_logger
from titan.common.security import enrolment
from titan.common.security.codes import new_code, parse_code
from titan.common.security.credentials import Credentials, load_credentials_dir
from titan.common.security.files import PRIVATE, PUBLIC, NewFile, locked_folder, write_together
from titan.common.security.identity import Identity, Role
from titan.common.security.request import KeyRequest, check_answer, new_request
from titan.common.security.revocation import LIST_FILE, parse_revocations, require_not_revoked
from titan.proto.titan.v1 import trust_pb2 as pb

log = get_logger("worker.enrol")

CODE_LIFE_S = 600.0
TRIES = 3
CONNECTION_S = 20.0  # from TCP's accept to the last message
MAX_PEERS = 32
POLL_S = 0.25


class _Code:
    """The code of the moment; it is used up by the first right proof, the third wrong one, or its age."""

    def __init__(self, certificate: bytes, life_s: float) -> None:
        self.shown = new_code()
        self.key = enrolment.derive_key(parse_code(self.shown), certificate)
        self.expires = time.monotonic() + life_s
        self.tries_left = TRIES
        self.used = False

    @property
    def over(self) -> bool:
        return self.used or self.tries_left <= 0 or time.monotonic() >= self.expires


class Enrolment:
    """Waits on `listener` until somebody brings a certificate; see `wait`.

    Args:
        listener: bound and listening; stays the caller's.
        folder: where key, certificate and authority are written.
        name: the only name a certificate may have; None suggests the host's and takes what comes.
        show: told what a person should read.
    """

    def __init__(
        self,
        listener: socket.socket,
        folder: Path,
        name: str | None,
        show: Callable[[str], None],
        *,
        code_life_s: float = CODE_LIFE_S,
        connection_s: float = CONNECTION_S,
    ) -> None:
        self._listener, self._folder, self._name, self._show = listener, folder, name, show
        self._life_s, self._connection_s = code_life_s, connection_s
        self._context, self._certificate = _bootstrap_context()
        self._code: _Code | None = None
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._enrolled: Identity | None = None

    def wait(self, stopping: threading.Event) -> Identity | None:
        """Serve until the certificate is on disk; None when `stopping` came first."""
        self._listener.settimeout(POLL_S)
        try:
            while not stopping.is_set():
                with self._lock:
                    if self._enrolled is not None:
                        return self._enrolled
                    self._renew_code()
                try:
                    plain, peer = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # out of descriptors, or the peer is gone again
                    log.warning("a connection could not be accepted", error=str(error))
                    stopping.wait(POLL_S)
                    continue
                self._admit(plain, str(peer[0]))
            return None
        finally:
            self._close_all()

    def _renew_code(self) -> None:
        if self._code is not None and not self._code.over:
            return
        if self._code is not None:
            reason = "expired" if self._code.tries_left > 0 and not self._code.used else "is used up"
            self._show(f"The code {self._code.shown} {reason}.")
        self._code = _Code(self._certificate, self._life_s)
        bound = self._listener.getsockname()
        self._show(
            f"This worker has no certificate yet. On the machine that holds the cluster's authority, run\n"
            f"  titan enroll {_reachable(bound[0])}:{bound[1]}\n"
            f"and type this code (good for {self._life_s / 60:.0f} minutes, {TRIES} tries): {self._code.shown}"
        )

    def _admit(self, plain: socket.socket, peer: str) -> None:
        with self._lock:
            while len(self._peers) >= MAX_PEERS:
                longest = next(iter(self._peers))
                del self._peers[longest]
                _shut(longest)
            thread = threading.Thread(target=self._serve, args=(plain, peer), name="titan-enrol", daemon=True)
            self._peers[plain] = thread
        thread.start()

    def _serve(self, plain: socket.socket, peer: str) -> None:
        deadline = time.monotonic() + self._connection_s
        try:
            plain.settimeout(self._connection_s)
            with self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False) as secure:
                with self._lock:
                    self._peers[secure] = self._peers.pop(plain, threading.current_thread())
                try:
                    secure.do_handshake()
                    self._enrol(secure, peer, deadline)
                finally:
                    with self._lock:
                        self._peers.pop(secure, None)
        except (TitanError, OSError) as error:
            log.warning(f"enrolment failed: {error}", peer=peer)
        finally:
            with self._lock:
                self._peers.pop(plain, None)
            plain.close()

    def _enrol(self, connection: ssl.SSLSocket, peer: str, deadline: float) -> None:
        nonce = enrolment.new_nonce()
        enrolment.send(connection, pb.EnrolChallenge(version=enrolment.VERSION, nonce=nonce), deadline)
        proof = enrolment.receive(connection, pb.EnrolProof, deadline, limit=enrolment.MAX_EARLY_BYTES)
        nonces = (nonce, proof.nonce)
        try:
            key = self._check_proof(proof, nonces)
        except EnrolmentRefused as error:
            enrolment.send(connection, pb.EnrolRequest(refusal=str(error)), deadline)
            raise
        name = self._name or enrolment.suggested_name(socket.gethostname())
        request = new_request(name)
        mac = enrolment.prove(key, "worker", *nonces, request.request_pem, name.encode())
        enrolment.send(connection, pb.EnrolRequest(mac=mac, request_pem=request.request_pem, name=name), deadline)
        grant = enrolment.receive(connection, pb.EnrolGrant, deadline)
        if grant.refusal:
            raise EnrolmentRefused(f"the coordinator says: {grant.refusal[: enrolment.MAX_WORDS]}")
        try:
            identity = self._take(grant, key, nonces, request)
        except TitanError as error:
            enrolment.send(connection, pb.EnrolDone(refusal=str(error)[: enrolment.MAX_WORDS]), deadline)
            raise
        log.info("enrolled", worker=identity.name, cluster=identity.cluster, peer=peer)
        with contextlib.suppress(OSError, TitanError):  # it is enrolled, whether or not the other side hears of it
            done = enrolment.prove(key, "done", *nonces, grant.certificate_pem)
            enrolment.send(connection, pb.EnrolDone(mac=done), deadline)
            connection.settimeout(1.0)
            connection.recv(1)  # until the other side has read it
        with self._lock:
            self._enrolled = identity

    def _check_proof(self, proof: pb.EnrolProof, nonces: tuple[bytes, bytes]) -> bytes:
        """K, when the proof is right. One at a time, so that no try is counted twice or not at all."""
        with self._lock:
            code = self._code
            if code is None or code.over:
                raise EnrolmentRefused("the code is not valid any more", "Use the one that the worker shows now")
            right = len(proof.nonce) == enrolment.NONCE_BYTES and enrolment.proved(
                proof.mac, code.key, "coordinator", *nonces
            )
            if not right:
                code.tries_left -= 1
                mend = f"{code.tries_left} tries are left" if code.tries_left else "The worker shows a new one"
                raise EnrolmentRefused("the code is wrong", mend)
            code.used = True
            return code.key

    def _take(self, grant: pb.EnrolGrant, key: bytes, nonces: tuple[bytes, bytes], request: KeyRequest) -> Identity:
        """Check what was granted, and write it."""
        granted = (grant.ca_pem, grant.certificate_pem, grant.revocations_pem)
        if not enrolment.proved(grant.mac, key, "grant", *nonces, *granted):
            raise EnrolmentRefused("the certificate did not come from who knows the code")
        identity = check_answer(grant.certificate_pem, grant.ca_pem, request, name=self._name)
        files = [
            NewFile(self._folder / f"{identity.name}.key", request.key_pem, PRIVATE),
            NewFile(self._folder / f"{identity.name}.pem", grant.certificate_pem, PUBLIC),
            NewFile(self._folder / "ca.pem", grant.ca_pem, PUBLIC),
        ]
        if grant.revocations_pem:
            known = parse_revocations(grant.revocations_pem, grant.ca_pem, "the list received")
            require_not_revoked(identity, known)
            files.append(NewFile(self._folder / LIST_FILE, grant.revocations_pem, PUBLIC))
        with locked_folder(self._folder):
            write_together(files)
        return identity

    def _close_all(self) -> None:
        with self._lock:
            peers = dict(self._peers)
        for connection in peers:
            _shut(connection)
        for thread in peers.values():
            if thread.ident is not None:
                thread.join(5)


def credentials_or_enrolment(
    folder: Path,
    name: str | None,
    address: str,
    wanted: bool | None,
    stopping: threading.Event,
    show: Callable[[str], None],
) -> tuple[Credentials, str] | None:
    """This worker's credentials and where to listen, after an enrolment if there has to be one.

    Args:
        address: `host:port`; of port 0, the one that was free for the enrolment is returned.
        wanted: enrol anew, or never; None does so when `folder` holds no cluster's files.

    Returns:
        None when `stopping` came first.

    Raises:
        SecurityError: there are certificates, and none that can be used. AddressInUse: the address is taken.
    """
    if wanted or (wanted is None and not any(folder.glob("*.pem"))):
        with listen(address) as listener:
            address = join_address(split_address(address)[0], listener.getsockname()[1])
            identity = Enrolment(listener, folder, name, show).wait(stopping)
        if identity is None:
            return None
        name = identity.name
    return load_credentials_dir(folder, role=Role.WORKER, name=name), address


def listen(address: str) -> socket.socket:
    """A listening socket; AddressInUse when there can be none."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise AddressInUse(
            f"{join_address(host, port)} cannot be listened on ({error.strerror or error})",
            "stop what uses it, or give another --listen",
        ) from error


def _bootstrap_context() -> tuple[ssl.SSLContext, bytes]:
    """TLS 1.3 with a self-signed certificate of its own, and that certificate (DER)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "titan enrolment")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))  # the code's age is what counts
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.set_alpn_protocols([enrolment.ALPN])
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # 0600; ssl reads files only
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.write(certificate.public_bytes(Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.public_bytes(Encoding.DER)


def _reachable(host: str) -> str:
    return f"[{host}]" if ":" in host and host != "::" else socket.gethostname() if host in ("0.0.0.0", "::") else host


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
