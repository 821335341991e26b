"""Bring a certificate to a worker that shows a one-time code; the coordinator's side of common.security.enrolment."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from titan.common.config.address import split_address
from titan.common.config.probe import ProbeFailed, connect
from titan.common.errors import EnrolmentRefused, KeyExists, SecurityError, TitanError, WorkerUnreachable
from titan.common.security import enrolment
from titan.common.security.authority import DEFAULT_DAYS, Authority, sign
from titan.common.security.codes import parse_code
from titan.common.security.files import PUBLIC, NewFile, locked_folder, read_bounded, write_together
from titan.common.security.identity import Identity, Role, parse_identity
from titan.common.security.ledger import record
from titan.common.security.request import read_request
from titan.common.security.revocation import RevocationList, load_revocations
from titan.proto.titan.v1 import trust_pb2 as pb

TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A worker that is a member now; `cert_path` is this machine's copy of its certificate."""

    identity: Identity
    cert_path: Path


@dataclass(frozen=True, slots=True)
class Wish:
    """What the certificate is to say.

    Args:
        name: None takes what the worker suggests.
        hosts: names and addresses beside the one it is enrolled at.
        replace: even though this machine knows a valid certificate of that name.
    """

    name: str | None = None
    hosts: tuple[str, ...] = ()
    days: int = DEFAULT_DAYS
    replace: bool = False


def enroll(
    address: str, typed_code: str, authority: Authority, wish: Wish, *, timeout_s: float = TIMEOUT_S
) -> Enrolled:
    """Enrol the worker that waits at `address` (normal form) and shows the code.

    Raises:
        EnrolmentRefused: the code is wrong or used up, or whoever answers does not know it.
        KeyExists: there is a certificate of that name.
        WorkerUnreachable, WorkerTimeout: nobody answers there, or somebody who is not waiting for this.
        ConfigError, SecurityError: a name or host that cannot be; a folder that cannot be written.
    """
    code = parse_code(typed_code)
    deadline = time.monotonic() + timeout_s
    try:
        with connect(address, deadline, timeout_s) as plain:
            plain.settimeout(max(0.001, deadline - time.monotonic()))
            with _context().wrap_socket(plain) as secure:
                return _enroll(secure, address, code, authority, wish, deadline)
    except ProbeFailed as failure:
        raise failure.error from failure
    except OSError as error:  # SSLError is one
        raise WorkerUnreachable(
            f"{address} does not wait for an enrolment ({error})",
            "A worker that has a certificate serves at once; start it with --enroll to replace it",
        ) from error


def _context() -> ssl.SSLContext:
    """TLS 1.3 with whoever answers: the code says whether it is the right one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([enrolment.ALPN])
    return context


def _enroll(
    connection: ssl.SSLSocket, address: str, code: str, authority: Authority, wish: Wish, deadline: float
) -> Enrolled:
    if connection.selected_alpn_protocol() != enrolment.ALPN:
        raise WorkerUnreachable(
            f"{address} answers, but does not wait for an enrolment",
            "A worker that has a certificate serves at once; start it with --enroll to replace it",
        )
    challenge = enrolment.receive(connection, pb.EnrolChallenge, deadline, limit=enrolment.MAX_EARLY_BYTES)
    enrolment.check_challenge(challenge)
    key = enrolment.derive_key(code, connection.getpeercert(binary_form=True) or b"")
    nonces = (challenge.nonce, enrolment.new_nonce())
    proof = pb.EnrolProof(nonce=nonces[1], mac=enrolment.prove(key, "coordinator", *nonces))
    enrolment.send(connection, proof, deadline)
    request = enrolment.receive(connection, pb.EnrolRequest, deadline, limit=64 * 1024)
    if request.refusal:
        raise EnrolmentRefused(f"the worker at {address} says: {_plain(request.refusal)}")
    if not enrolment.proved(request.mac, key, "worker", *nonces, request.request_pem, request.name.encode()):
        raise EnrolmentRefused(
            f"who answers at {address} does not know the code: it is not the worker that shows it",
            "Check the address; somebody may stand between the two machines",
        )
    try:
        certificate, known = _sign(address, request, authority, wish)
    except TitanError as error:
        enrolment.send(connection, pb.EnrolGrant(refusal=str(error)[: enrolment.MAX_WORDS]), deadline)
        raise
    ca_pem = authority.certificate.public_bytes(Encoding.PEM)
    cert_pem = certificate.public_bytes(Encoding.PEM)
    mac = enrolment.prove(key, "grant", *nonces, ca_pem, cert_pem, known.pem)
    grant = pb.EnrolGrant(mac=mac, ca_pem=ca_pem, certificate_pem=cert_pem, revocations_pem=known.pem)
    enrolment.send(connection, grant, deadline)
    done = enrolment.receive(connection, pb.EnrolDone, deadline, limit=enrolment.MAX_EARLY_BYTES)
    if done.refusal or not enrolment.proved(done.mac, key, "done", *nonces, cert_pem):
        words = _plain(done.refusal) or "its last word is not right"
        raise EnrolmentRefused(f"the worker at {address} did not take the certificate: {words}")
    identity = parse_identity(certificate)
    path = authority.folder / f"{identity.name}.pem"
    with locked_folder(authority.folder):
        write_together([NewFile(path, cert_pem, PUBLIC)])
    return Enrolled(identity, path)


def _sign(
    address: str, request: pb.EnrolRequest, authority: Authority, wish: Wish
) -> tuple[x509.Certificate, RevocationList]:
    """A recorded certificate for the worker's key, and the list of revoked it should know."""
    name = wish.name or enrolment.suggested_name(request.name)
    known = load_revocations(authority.folder / "ca.pem", authority.certificate.public_bytes(Encoding.PEM))
    _refuse_double(authority.folder, name, known, wish.replace)
    key = read_request(request.request_pem, f"the worker at {address}")
    hosts = (split_address(address)[0], *wish.hosts)
    certificate = sign(authority, key, name, role=Role.WORKER, hosts=hosts, days=wish.days)
    record(authority.folder, certificate)
    return certificate, known


def _refuse_double(folder: Path, name: str, known: RevocationList, replace: bool) -> None:
    """Two machines of one name cannot be told apart; a key that was made here belongs to somebody."""
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    if key.exists() or key.is_symlink():
        raise KeyExists(
            f"{key} exists: a certificate of that name was issued by hand",
            "Choose another --name, or remove both files",
        )
    if not cert.exists():
        return
    try:
        old = parse_identity(read_bounded(cert, mend=""))
    except SecurityError as error:
        raise KeyExists(f"{cert} exists, and is no certificate", "Choose another --name, or remove it") from error
    if old.serial not in known.serials and old.not_after > datetime.now(UTC) and not replace:
        raise KeyExists(
            f"{name} has a valid certificate already ({cert})",
            f"Choose another --name; if the machine was lost, `titan certs revoke {name}` first; or use --force",
        )


def _plain(words: str) -> str:
    """A peer's words, fit for a terminal."""
    return "".join(c for c in words[: enrolment.MAX_WORDS] if c.isprintable())
