"""Taking certificates back: a new list of revoked ones, signed by the authority. Opens no connection."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from titan.common.errors import CertificateInvalid, CertificateMissing
from titan.common.security.authority import BEARER, Authority, issue
from titan.common.security.credentials import Credentials, load_credentials
from titan.common.security.files import PUBLIC, NewFile, locked_folder, write_together
from titan.common.security.identity import Identity, Role
from titan.common.security.ledger import CLOCK_SKEW, issued
from titan.common.security.revocation import (
    LIST_FILE,
    MAX_REVOKED,
    RevocationList,
    Revocations,
    load_revocations,
    parse_revocations,
)


@dataclass(frozen=True, slots=True)
class Revoked:
    """What `revoke` did: the new list, and whose certificates it now has that it had not."""

    revocations: RevocationList
    identities: tuple[Identity, ...]


def revoke(authority: Authority, name: str, *, now: datetime | None = None) -> Revoked:
    """Revoke every certificate that `name` has had until now; a later one is good again.

    The list is written at once or not at all. Certificates past their date leave it: they are refused anyway.

    Raises:
        CertificateMissing: nothing was issued under that name, or all of it is revoked or expired already.
        SecurityError: the folder cannot be written, or its list cannot be trusted.
    """
    now = now or datetime.now(UTC)
    with locked_folder(authority.folder):
        ca_pem = authority.certificate.public_bytes(Encoding.PEM)
        old = load_revocations(authority.folder / "ca.pem", ca_pem)
        known = issued(authority.folder, authority.cluster)
        expired = {i.serial for i in known if i.not_after < now}
        fresh = tuple(i for i in known if i.name == name and i.serial not in old.serials | expired)
        if not fresh:
            raise CertificateMissing(
                f"{authority.folder} knows no valid certificate of {name!r}",
                "See `titan certs show` for the names there are",
            )
        serials = sorted((old.serials - expired) | {i.serial for i in fresh})
        if len(serials) > MAX_REVOKED:
            raise CertificateInvalid(
                f"more than {MAX_REVOKED} certificates would be revoked", "Make a new cluster with `titan certs init`"
            )
        pem = _sign(authority, serials, old, now).public_bytes(Encoding.PEM)
        write_together([NewFile(authority.folder / LIST_FILE, pem, PUBLIC)])
    return Revoked(parse_revocations(pem, ca_pem, LIST_FILE), fresh)


@contextlib.contextmanager
def list_bearer(authority: Authority) -> Iterator[tuple[Credentials, Revocations]]:
    """An operator's certificate, for as long as the block takes, and the list to carry: whatever was revoked, the
    coordinator's own certificate included, the machine that holds the authority can tell the workers.

    Raises:
        SecurityError: the authority's folder, or a temporary one, cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="titan-") as made:  # 0700
        folder = Path(made)
        issued_now = issue(authority, BEARER, role=Role.OPERATOR, days=1, folder=folder)
        ca_pem = authority.certificate.public_bytes(Encoding.PEM)
        files = [NewFile(folder / "ca.pem", ca_pem, PUBLIC)]
        current = load_revocations(authority.folder / "ca.pem", ca_pem)
        if current.pem:
            files.append(NewFile(folder / LIST_FILE, current.pem, PUBLIC))
        write_together(files)
        credentials = load_credentials(folder / "ca.pem", issued_now.cert_path, issued_now.key_path)
        yield credentials, Revocations(folder / "ca.pem", ca_pem)


def _sign(
    authority: Authority, serials: list[int], old: RevocationList, now: datetime
) -> x509.CertificateRevocationList:
    """A list that is newer than `old` for OpenSSL too, which compares the times of lists to the second."""
    start = (now - CLOCK_SKEW).replace(microsecond=0)
    if old.pem:
        start = max(start, x509.load_pem_x509_crl(old.pem).last_update_utc + timedelta(seconds=1))
    key_id = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(start)
        .next_update(authority.certificate.not_valid_after_utc)  # a list counts until a newer one is there
        .add_extension(x509.CRLNumber(old.number + 1), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id), critical=False)
    )
    for serial in serials:
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        )
    return builder.sign(authority.key, hashes.SHA256())
