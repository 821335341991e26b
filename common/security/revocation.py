"""Which certificates of a cluster are not accepted any more: a list signed by the authority (X.509 CRL), and its file.

    certs/revoked.pem   beside ca.pem, on every machine that has heard of it

The list says itself who made it and how new it is, so that anybody may carry it: a machine takes a list of its own
authority with a higher number and no other. Knows neither connections nor what ends when a certificate is revoked.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from titan.common.errors import CertificateInvalid, CertificateMissing, CertificateRevoked, SecurityError
from titan.common.security.files import MAX_FILE_BYTES, PUBLIC, NewFile, read_bounded, write_together
from titan.common.security.identity import Identity

LIST_FILE = "revoked.pem"
MAX_REVOKED = 4096
_MEND = "Copy revoked.pem again from the machine that holds the authority"
_UNREADABLE = (
    ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.ExtensionNotFound, x509.DuplicateExtension,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RevocationList:
    """A checked list. `number` grows with every list that the authority signs; 0 stands for none."""

    number: int = 0
    serials: frozenset[int] = frozenset()
    pem: bytes = field(default=b"", repr=False)


NOTHING_REVOKED = RevocationList()


def parse_revocations(pem: bytes, ca_pem: bytes, what: str) -> RevocationList:
    """A list from outside, or from a file.

    Args:
        ca_pem: the authorities whose lists count.
        what: names the list in messages.

    Raises:
        CertificateInvalid: no list, too long, or not signed by one of these authorities.
    """
    if len(pem) > MAX_FILE_BYTES:
        raise CertificateInvalid(f"{what} has {len(pem)} bytes, at most {MAX_FILE_BYTES} are read", _MEND)
    try:
        parsed = x509.load_pem_x509_crl(pem)
        number = parsed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        signed = any(_signed_by(parsed, authority) for authority in x509.load_pem_x509_certificates(ca_pem))
        if len(parsed) > MAX_REVOKED:
            raise CertificateInvalid(f"{what} has more than {MAX_REVOKED} entries", _MEND)
        serials = frozenset(entry.serial_number for entry in parsed)
    except _UNREADABLE as error:
        raise CertificateInvalid(f"{what} cannot be read as a revocation list", _MEND) from error
    if not signed or not 0 < number < 1 << 63:
        raise CertificateInvalid(f"{what} was not made by this cluster's authority", _MEND)
    return RevocationList(number, serials, pem)


def _signed_by(parsed: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = authority.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or parsed.issuer != authority.subject:
        return False
    return parsed.is_signature_valid(key)


def load_revocations(ca: Path, ca_pem: bytes) -> RevocationList:
    """The list beside `ca`; NOTHING_REVOKED when there is no such file.

    Raises:
        CertificateInvalid: unreadable, or of another authority. (A damaged list must not let anybody in.)
    """
    path = ca.with_name(LIST_FILE)
    try:
        pem = read_bounded(path, mend=_MEND)
    except CertificateMissing:
        return NOTHING_REVOKED
    return parse_revocations(pem, ca_pem, str(path))


def require_not_revoked(identity: Identity, revocations: RevocationList) -> None:
    """Raise CertificateRevoked when this very certificate is on the list; another of the same name is not."""
    if identity.serial in revocations.serials:
        raise CertificateRevoked(
            f"the certificate of {identity} (serial {identity.serial:x}) was revoked",
            "If the machine is to take part again, give it a new certificate with `titan enroll`",
        )


class Revocations:
    """The list of one folder, kept in step with its file. Thread-safe.

    Args:
        ca: path of ca.pem; the list lies beside it.
        ca_pem: its content.

    Raises:
        CertificateInvalid: there is a list that cannot be trusted.
    """

    def __init__(self, ca: Path, ca_pem: bytes) -> None:
        self.path = ca.with_name(LIST_FILE)
        self.problem = ""
        self._ca, self._ca_pem = ca, ca_pem
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self.current = load_revocations(ca, ca_pem)

    def refresh(self) -> bool:
        """Look at the file again; True when a newer list is in force. A damaged file leaves the old list in force.

        `problem` says what is wrong with the file, empty when nothing is.
        """
        with self._lock:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._seen = stamp
            try:
                found = load_revocations(self._ca, self._ca_pem)
            except SecurityError as error:
                self.problem = str(error)
                return False
            self.problem = ""
            if found.number <= self.current.number:
                return False
            self.current = found
            return True

    def offer(self, pem: bytes, bearer: str) -> bool:
        """Take a list that somebody brought; True when it is newer than what was known, and now in force.

        It is kept on disk too. Where that is not possible it counts until the end of the process; `problem` says so.

        Raises:
            CertificateInvalid: not a list of this cluster's authority.
        """
        offered = parse_revocations(pem, self._ca_pem, f"the revocation list from {bearer}")
        with self._lock:
            if offered.number <= self.current.number:
                return False
            self.current, self.problem = offered, ""
            try:
                write_together([NewFile(self.path, offered.pem, PUBLIC)])
            except SecurityError as error:
                self.problem = f"list no. {offered.number} counts until this process ends: {error}"
            self._seen = self._stamp()
            return True

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
