"""Who a certificate says its holder is. Knows neither files nor connections.

A cluster certificate carries one URI, `titan://cluster/<cluster>/<role>/<name>`, beside the hosts it is good for and
the name `<name>.<role>.titan.internal`, by which TLS itself can check whom it reached.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from titan.common.config.address import normalise_host
from titan.common.config.hosts import NAME_PATTERN
from titan.common.errors import CertificateExpired, CertificateInvalid, ConfigError, RoleRefused

MAX_CERTIFICATE_BYTES = 64 * 1024
_URI = re.compile(r"titan://cluster/([0-9a-f]{32})/([a-z]{1,20})/([a-z0-9-]{1,63})", re.ASCII)


class Role(StrEnum):
    """What the holder of a certificate may do."""

    COORDINATOR = "coordinator"
    WORKER = "worker"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a certificate says. Times are UTC; `hosts` are names and addresses without ports."""

    name: str
    role: Role
    cluster: str
    serial: int
    not_before: datetime
    not_after: datetime
    hosts: tuple[str, ...]

    @property
    def tls_name(self) -> str:
        """The name that stands for this holder in TLS, whatever address it has."""
        return tls_name(self.name, self.role)

    @property
    def uri(self) -> str:
        return f"titan://cluster/{self.cluster}/{self.role}/{self.name}"

    def __str__(self) -> str:
        return self.name if self.name == self.role else f"{self.role} {self.name}"


def tls_name(name: str, role: Role) -> str:
    return f"{name}.{role}.titan.internal"


def parse_identity(certificate: bytes | x509.Certificate) -> Identity:
    """The identity in a certificate, PEM or DER. Signature and dates are not checked here.

    Raises:
        CertificateInvalid: not a certificate, or not one of a Titan cluster.
    """
    if isinstance(certificate, x509.Certificate):
        return _identity(certificate)
    if len(certificate) > MAX_CERTIFICATE_BYTES:
        raise CertificateInvalid(f"a certificate of {len(certificate)} bytes is too large")
    return _parse(certificate)


@lru_cache(maxsize=256)
def _parse(raw: bytes) -> Identity:
    return _identity(read_certificate(raw, "the certificate"))


def read_certificate(raw: bytes, what: str) -> x509.Certificate:
    """A certificate from PEM or DER; CertificateInvalid names `what`."""
    try:
        return x509.load_pem_x509_certificate(raw) if b"-----BEGIN" in raw else x509.load_der_x509_certificate(raw)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise CertificateInvalid(f"{what} cannot be read as a certificate", "Issue a new one") from error


def _identity(certificate: x509.Certificate) -> Identity:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = [m for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if (m := _URI.fullmatch(uri))]
        hosts = (
            *names.get_values_for_type(x509.DNSName),
            *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
        )
        serial, start, end = (
            certificate.serial_number,
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
        )
    except (
        ValueError,
        TypeError,
        UnsupportedAlgorithm,
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
    ) as error:
        raise CertificateInvalid(
            "the certificate names no member of a Titan cluster", "Issue it with `titan certs`"
        ) from error
    if len(uris) != 1 or uris[0][2] not in set(Role) or not NAME_PATTERN.fullmatch(uris[0][3]):
        raise CertificateInvalid("the certificate names no member of a Titan cluster", "Issue it with `titan certs`")
    cluster, role, name = uris[0].groups()
    own_name = tls_name(name, Role(role))
    return Identity(name, Role(role), cluster, serial, start, end, tuple(h for h in hosts if h != own_name))


def host_matches(identity: Identity, host: str) -> bool:
    """Whether the certificate is good for `host`, a name or an address without port (IPv6 zones do not count)."""
    try:
        wanted = normalise_host(host.partition("%")[0])
    except ConfigError:
        return False
    return wanted in identity.hosts


def require_role(identity: Identity, *roles: Role) -> None:
    """Raise RoleRefused unless the holder has one of `roles`."""
    if identity.role not in roles:
        allowed = " or ".join(roles)
        raise RoleRefused(
            f"{identity.name} has a certificate for the role {identity.role}, and this needs {allowed}",
            f"Use a certificate issued with `--role {roles[0]}`",
        )


def issue_command(identity: Identity) -> str:
    """The command that renews this certificate."""
    hosts = "".join(f" --host {host}" for host in identity.hosts)
    return f"titan certs issue {identity.name} --role {identity.role}{hosts} --force"


def check_dates(certificate: x509.Certificate, what: str, mend: str, now: datetime) -> None:
    """Raise CertificateExpired or CertificateInvalid when `now` is outside the certificate's dates."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise CertificateExpired(f"{what} expired on {show_time(end)}", mend)
    if now < start:
        raise CertificateInvalid(
            f"{what} is valid only from {show_time(start)}, and this machine's clock says {show_time(now)}",
            "Set the clock",
        )


def show_time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
