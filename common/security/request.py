"""A new key and the request to have it signed (PKCS #10). The key stays on the machine that made it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from titan.common.errors import CertificateInvalid
from titan.common.security.credentials import issuer_of
from titan.common.security.identity import Identity, Role, check_dates, parse_identity, read_certificate

MAX_REQUEST_BYTES = 16 * 1024
_MEND = "Run the same version of Titan on both machines"


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """A private key that waits for its certificate."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    request_pem: bytes

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_request(name: str) -> KeyRequest:
    """A fresh P-256 key, and a request signed with it. Whoever signs decides about name, role and hosts."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return KeyRequest(key, request.public_bytes(Encoding.PEM))


def read_request(pem: bytes, who: str) -> ec.EllipticCurvePublicKey:
    """The key of a request; nothing else in it counts.

    Raises:
        CertificateInvalid: not a request, not signed with its own key, or another kind of key than P-256.
    """
    if len(pem) > MAX_REQUEST_BYTES:
        raise CertificateInvalid(f"the signing request of {who} has {len(pem)} bytes", _MEND)
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        signed = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise CertificateInvalid(f"the signing request of {who} cannot be read", _MEND) from error
    if not signed or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateInvalid(f"the signing request of {who} is not signed with a P-256 key of its own", _MEND)
    return key


def check_answer(
    certificate_pem: bytes, ca_pem: bytes, request: KeyRequest, *, name: str | None, now: datetime | None = None
) -> Identity:
    """What a worker checks before it takes a certificate into use.

    Args:
        name: the name it must have; None takes any.

    Raises:
        CertificateInvalid: not for this key, not a worker's, another name, not of `ca_pem`.
        CertificateExpired: or the authority is.
    """
    certificate = read_certificate(certificate_pem, "the certificate received")
    identity = parse_identity(certificate)
    try:
        same_key = certificate.public_key() == request.key.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertificateInvalid("the certificate received has no key that can be read", _MEND) from error
    if not same_key:
        raise CertificateInvalid("the certificate received is for another key", _MEND)
    if identity.role is not Role.WORKER or name not in (None, identity.name):
        wanted = f"worker {name}" if name else "a worker"
        raise CertificateInvalid(
            f"the certificate received is for {identity}, and this is {wanted}", "Give both sides the same --name"
        )
    now = now or datetime.now(UTC)
    authority = issuer_of(certificate, ca_pem, "the certificate received", "the authority received with it")
    check_dates(authority, "the authority", "Make a new cluster with `titan certs init --force`", now)
    check_dates(certificate, "the certificate received", "Set the clocks of both machines", now)
    return identity
