"""One's own certificate, key and authority, checked before any connection is tried. Opens no connection."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from titan.common.errors import CertificateInvalid, CertificateMissing, SecurityError
from titan.common.security.files import read_bounded
from titan.common.security.identity import (
    Identity,
    Role,
    check_dates,
    issue_command,
    parse_identity,
    read_certificate,
    require_role,
)
from titan.common.security.revocation import load_revocations, require_not_revoked


@dataclass(frozen=True, slots=True)
class Credentials:
    """A checked certificate with its key and authority, as PEM; `load_credentials` makes it."""

    identity: Identity
    ca_path: Path
    cert_path: Path
    key_path: Path
    ca_pem: bytes = field(repr=False)
    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)


def load_credentials(ca: Path | str, cert: Path | str, key: Path | str, *, now: datetime | None = None) -> Credentials:
    """Read and check one's own certificate, before any connection is tried.

    Args:
        ca: PEM of the cluster's authority (several when it is being replaced).
        cert: PEM of the certificate.
        key: PEM of its private key, mode 0600.
        now: the time to check dates at; the clock's when absent.

    Raises:
        CertificateMissing: a file is not there.
        CertificateExpired: certificate or authority is past its date.
        CertificateInvalid: unreadable, key open to others or of another certificate, foreign authority, not yet valid.
        CertificateRevoked: it is on the list beside `ca`.
    """
    ca, cert, key = Path(ca), Path(cert), Path(key)
    now = now or datetime.now(UTC)
    make = f"Make it with `titan certs issue {cert.stem} --host HOST`, or copy it from the machine that did"
    ca_pem = read_bounded(ca, mend="Make it with `titan certs init`, or copy it from the machine that did")
    cert_pem = read_bounded(cert, mend=make)
    key_pem = read_bounded(key, mend=make, private=True)
    certificate = read_certificate(cert_pem, str(cert))
    try:
        identity = parse_identity(certificate)
    except CertificateInvalid as error:
        raise CertificateInvalid(f"{cert}: {error.cause}", error.mend) from error
    _check_key(certificate, key_pem, cert, key)
    authority = issuer_of(certificate, ca_pem, str(cert), str(ca))
    renew_all = "Make a new cluster with `titan certs init --force` and issue all certificates again"
    check_dates(authority, f"the authority in {ca}", renew_all, now)
    check_dates(certificate, f"the certificate of {identity} in {cert}", f"Renew it: `{issue_command(identity)}`", now)
    require_not_revoked(identity, load_revocations(ca, ca_pem))
    return Credentials(identity, ca, cert, key, ca_pem, cert_pem, key_pem)


def load_credentials_dir(
    directory: Path | str, *, role: Role, name: str | None = None, now: datetime | None = None
) -> Credentials:
    """Credentials of a folder as `--certs DIR` gives it: `ca.pem` and one certificate of `role` with its key.

    Args:
        name: which one, when the folder has several of this role.

    Raises:
        CertificateMissing: none there. CertificateInvalid: several, or as `load_credentials` has it.
    """
    directory = Path(directory)
    ca = directory / "ca.pem"
    if name is not None:
        found = [directory / f"{name}.pem"]
    else:
        found = [path for path in sorted(directory.glob("*.pem")) if path != ca and _has_role(path, role)]
    if not found:
        raise CertificateMissing(
            f"{directory} holds no certificate of a {role} with its key",
            f"Make one with `titan certs issue NAME --role {role} --host HOST --dir {directory}`",
        )
    if len(found) > 1:
        names = ", ".join(path.stem for path in found)
        raise CertificateInvalid(f"{directory} holds several {role} certificates ({names})", "Say which with --name")
    credentials = load_credentials(ca, found[0], found[0].with_suffix(".key"), now=now)
    require_role(credentials.identity, role)
    return credentials


def _has_role(path: Path, role: Role) -> bool:
    if not path.with_suffix(".key").exists():
        return False
    try:
        return parse_identity(read_bounded(path, mend="")).role == role
    except SecurityError:
        return False


def _check_key(certificate: x509.Certificate, key_pem: bytes, cert: Path, key: Path) -> None:
    try:
        private = load_pem_private_key(key_pem, password=None)
        own = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        certified = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CertificateInvalid(f"{key} cannot be read as a private key", "Issue the certificate again") from error
    if own != certified:
        raise CertificateInvalid(
            f"{key} is not the key of {cert}", "Copy both from one `titan certs issue`, or issue again"
        )


def key_fits(certificate: x509.Certificate, key: Path) -> bool:
    """Whether the file `key` holds the private key of `certificate`."""
    try:
        _check_key(certificate, read_bounded(key, mend="", private=True), Path(), key)
    except SecurityError:
        return False
    return True


def issuer_of(certificate: x509.Certificate, ca_pem: bytes, cert: str, ca: str) -> x509.Certificate:
    """The authority in `ca_pem` that signed `certificate`; `cert` and `ca` name both in messages.

    Raises:
        CertificateInvalid: none of them did, or it is none.
    """
    try:
        authorities = x509.load_pem_x509_certificates(ca_pem)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise CertificateInvalid(
            f"{ca} cannot be read as certificates", "Copy ca.pem again from the authority"
        ) from error
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            continue
        if _may_issue(authority):
            return authority
        raise CertificateInvalid(f"the issuer in {ca} is not an authority", "Copy ca.pem again from the authority")
    raise CertificateInvalid(
        f"{cert} was not issued by the authority in {ca}", "Use the ca.pem and certificate of the same cluster"
    )


def _may_issue(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False
