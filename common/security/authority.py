"""The cluster's authority: makes itself once and signs members' keys. Opens no connection, knows no command line.

    certs/ca.pem  ca.key        the authority (EC P-256, ten years); its name carries the cluster's random id
    certs/NAME.pem  NAME.key    a member
    certs/issued/               a copy of every certificate signed here, see ledger

`sign` needs only a public key, so a machine can keep its private key to itself.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from titan.common.config.address import normalise_host
from titan.common.config.hosts import NAME_PATTERN
from titan.common.errors import CertificateInvalid, ConfigError, KeyExists
from titan.common.security.files import PRIVATE, PUBLIC, NewFile, locked_folder, read_bounded, write_together
from titan.common.security.identity import Identity, Role, check_dates, parse_identity, tls_name
from titan.common.security.ledger import CLOCK_SKEW, record
from titan.common.security.revocation import LIST_FILE

AUTHORITY_DAYS = 3650
DEFAULT_DAYS = 825
MAX_HOSTS = 64
BEARER = "list-bearer"
RESERVED_NAMES = ("ca", "revoked")  # files of the authority itself
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_CLUSTER_NAME = re.compile(r"titan cluster ([0-9a-f]{32})", re.ASCII)
_INIT = "Make one with `titan certs init`"


@dataclass(frozen=True, slots=True)
class Authority:
    """A cluster's certificate authority, able to sign.

    Args:
        cluster: random id, 32 hex characters, part of every identity.
    """

    folder: Path
    cluster: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)


@dataclass(frozen=True, slots=True)
class Issued:
    """A member's new certificate."""

    identity: Identity
    cert_path: Path
    key_path: Path


def init_authority(folder: Path | str, *, force: bool = False, now: datetime | None = None) -> Authority:
    """Make a new cluster: `ca.pem` and `ca.key` in `folder` (made when absent).

    Raises:
        KeyExists: there is one, and `force` was not given. With it, certificates of the old cluster end to be accepted.
        SecurityError: the folder cannot be written.
    """
    folder = Path(folder)
    now = now or datetime.now(UTC)
    cluster = secrets.token_hex(16)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Titan"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"titan cluster {cluster}"),
        ]
    )
    usage = _key_usage(signs_certificates=True)
    certificate = (
        _builder(name, name, key.public_key(), now, now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    with locked_folder(folder):
        _refuse_overwrite(folder, "ca", force, "it is the authority of a cluster, and --force ends that cluster")
        _write_pair(folder, "ca", key, certificate)
        (folder / LIST_FILE).unlink(missing_ok=True)  # of the cluster that has just ended
    return Authority(folder, cluster, certificate, key)


def load_authority(folder: Path | str, *, now: datetime | None = None) -> Authority:
    """The authority in `folder`.

    Raises:
        CertificateMissing, CertificateInvalid, CertificateExpired: absent, damaged, or past its date.
    """
    folder = Path(folder)
    cert_path, key_path = folder / "ca.pem", folder / "ca.key"
    cert_pem = read_bounded(cert_path, mend=_INIT)
    key_pem = read_bounded(key_path, mend="Issue certificates on the machine that holds it", private=True)
    try:
        certificate = x509.load_pem_x509_certificate(cert_pem)
        key = load_pem_private_key(key_pem, password=None)
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CertificateInvalid(f"the authority in {folder} cannot be read", "Restore it from a copy") from error
    match = _CLUSTER_NAME.fullmatch(str(names[0].value)) if names else None
    if match is None or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateInvalid(f"{cert_path} is not the authority of a Titan cluster", _INIT)
    if key.public_key() != certificate.public_key():
        raise CertificateInvalid(f"{key_path} is not the key of {cert_path}", "Restore both from one copy")
    check_dates(
        certificate, f"the authority in {cert_path}", "Make a new cluster with `titan certs init --force`", _now(now)
    )
    return Authority(folder, match[1], certificate, key)


def issue(
    authority: Authority,
    name: str,
    *,
    role: Role,
    hosts: tuple[str, ...] | list[str] = (),
    days: int = DEFAULT_DAYS,
    force: bool = False,
    folder: Path | str | None = None,
    now: datetime | None = None,
) -> Issued:
    """Make a key and a certificate, `NAME.key` and `NAME.pem`, in the authority's folder or `folder`.

    Raises:
        ConfigError: a name, host or number of days that cannot be.
        KeyExists: there is one of that name, and `force` was not given.
        SecurityError: the folder cannot be written; what was there is there still.
    """
    folder = Path(folder) if folder is not None else authority.folder
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = sign(authority, key.public_key(), name, role=role, hosts=hosts, days=days, now=now)
    with locked_folder(folder):
        _refuse_overwrite(folder, name, force, "--force replaces it")
        record(authority.folder, certificate)
        _write_pair(folder, name, key, certificate)
    return Issued(parse_identity(certificate), folder / f"{name}.pem", folder / f"{name}.key")


def sign(
    authority: Authority,
    public_key: ec.EllipticCurvePublicKey,
    name: str,
    *,
    role: Role,
    hosts: tuple[str, ...] | list[str] = (),
    days: int = DEFAULT_DAYS,
    now: datetime | None = None,
) -> x509.Certificate:
    """A certificate for `public_key`, valid from five minutes ago (clocks differ) and never longer than the authority.

    Raises:
        ConfigError: a name, host or number of days that cannot be; a worker without a host.
    """
    if not NAME_PATTERN.fullmatch(name) or name in RESERVED_NAMES:
        raise ConfigError(
            f"{name!r} cannot be a certificate's name", "Use 1 to 63 of a-z, 0-9 and -, and not `ca` or `revoked`"
        )
    if not 1 <= days <= AUTHORITY_DAYS:
        raise ConfigError(f"a certificate cannot be valid for {days} days", f"Use 1 to {AUTHORITY_DAYS}")
    listed = _hosts(hosts)
    if role is Role.WORKER and not listed:
        raise ConfigError(f"worker {name} has no host", "Give each name and address it is reached by with --host")
    now = _now(now)
    end = min(now + timedelta(days=days), authority.certificate.not_valid_after_utc)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role is not Role.OPERATOR:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    alternatives = [
        x509.UniformResourceIdentifier(f"titan://cluster/{authority.cluster}/{role}/{name}"),
        x509.DNSName(tls_name(name, role)),
        *(_general_name(host) for host in listed),
    ]
    subject = x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Titan"), x509.NameAttribute(NameOID.COMMON_NAME, name)]
    )
    issuer_key_id = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        _builder(subject, authority.certificate.subject, public_key, now, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key_id), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _now(now: datetime | None) -> datetime:
    return now or datetime.now(UTC)


def _hosts(hosts: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Normal forms without doubles; one loopback host stands for all three."""
    if len(hosts) > MAX_HOSTS:
        raise ConfigError(f"{len(hosts)} hosts are too many for one certificate", f"Give at most {MAX_HOSTS}")
    listed = [normalise_host(host.partition("%")[0].removeprefix("[").removesuffix("]")) for host in hosts]
    if any(host in ("0.0.0.0", "::") for host in listed):
        raise ConfigError("nobody connects to 0.0.0.0 or ::", "Give the names and addresses others use with --host")
    if any(host in LOOPBACK_HOSTS for host in listed):
        listed += LOOPBACK_HOSTS
    return tuple(dict.fromkeys(listed))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    serial = x509.random_serial_number()
    return builder.serial_number(serial).not_valid_before(now - CLOCK_SKEW).not_valid_after(end)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _refuse_overwrite(folder: Path, stem: str, force: bool, what_force_does: str) -> None:
    there = [path for path in (folder / f"{stem}.key", folder / f"{stem}.pem") if path.exists() or path.is_symlink()]
    if there and not force:
        raise KeyExists(f"{there[0]} exists already", f"Keep it, or choose another name or --dir; {what_force_does}")


def _write_pair(folder: Path, stem: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_together(
        [
            NewFile(folder / f"{stem}.key", key_pem, PRIVATE),
            NewFile(folder / f"{stem}.pem", certificate.public_bytes(Encoding.PEM), PUBLIC),
        ]
    )
