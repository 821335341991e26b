"""What an authority has signed: a copy of every certificate, so that it can be revoked by name. Knows files only.

certs/issued/NAME-SERIAL.pem
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from titan.common.errors import SecurityError
from titan.common.security.files import PUBLIC, NewFile, read_bounded, write_together
from titan.common.security.identity import Identity, parse_identity

ISSUED_FOLDER = "issued"
MAX_ISSUED = 100_000
CLOCK_SKEW = timedelta(minutes=5)  # what is signed is valid from a little earlier: clocks differ


def record(folder: Path, certificate: x509.Certificate) -> None:
    """Remember a certificate of the authority in `folder`, before anybody gets it.

    Raises:
        SecurityError: the folder cannot be written.
    """
    identity = parse_identity(certificate)
    kept = folder / ISSUED_FOLDER
    try:
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SecurityError(
            f"{kept} cannot be made ({error.strerror}); nothing was changed", "Check the folder's owner"
        ) from error
    name = f"{identity.name}-{identity.serial:x}.pem"
    write_together([NewFile(kept / name, certificate.public_bytes(Encoding.PEM), PUBLIC)])


def issued(folder: Path, cluster: str, name: str | None = None) -> list[Identity]:
    """Every certificate of `cluster` that the folder knows of, of one name or of all, newest first."""
    paths = [*folder.glob("*.pem"), *(folder / ISSUED_FOLDER).glob("*.pem")]
    found: dict[int, Identity] = {}
    for path in paths[:MAX_ISSUED]:
        try:
            identity = parse_identity(read_bounded(path, mend=""))
        except SecurityError:
            continue  # the authority itself, the list of revoked, somebody else's file
        if identity.cluster == cluster and name in (None, identity.name):
            found[identity.serial] = identity
    return sorted(found.values(), key=lambda identity: identity.not_before, reverse=True)
