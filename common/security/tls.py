"""TLS settings of a cluster for gRPC and for plain sockets, and what a failed handshake means. Opens no connection.

Plain sockets (`ssl`) speak TLS 1.3 and nothing older. gRPC's Python API has no setting for it: grpcio 1.85 negotiates
TLS 1.3 between two of its kind, but a server also takes TLS 1.2 from a peer that holds a certificate of the cluster.
Two things close that, both measured: `peer_identity` refuses a call whose connection is not TLS 1.3 (gRPC reports the
version), and `prepare_grpc`, called before the first import of grpc, leaves TLS 1.2 no cipher that works with
the cluster's EC keys, so that the handshake itself fails. Without a certificate neither version gets past an alert.
"""

from __future__ import annotations

import os
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from titan.common.config.address import split_address
from titan.common.errors import CertificateInvalid, WorkerUnreachable
from titan.common.security.credentials import Credentials
from titan.common.security.identity import (
    Identity,
    Role,
    host_matches,
    parse_identity,
    show_time,
    tls_name,
)
from titan.common.security.revocation import LIST_FILE, load_revocations

if TYPE_CHECKING:
    import grpc

_GRPC_CIPHERS = "GRPC_SSL_CIPHER_SUITES"  # read once, when grpc is imported; names TLS 1.2 suites only
_GRPC_VERBOSITY = "GRPC_VERBOSITY"
_RSA_ONLY = "ECDHE-RSA-AES256-GCM-SHA384"
SETTLE_S = 0.1


def prepare_grpc() -> bool:
    """Leave gRPC no TLS 1.2 in this process, and no line on standard error for every handshake that fails.

    True when it came in time (grpc was not imported yet). Both are settings of gRPC's own that it has no other way to
    be given; what somebody has set for the second stays.
    """
    os.environ[_GRPC_CIPHERS] = _RSA_ONLY
    os.environ.setdefault(_GRPC_VERBOSITY, "ERROR")  # a stranger could fill the disk with the lines of INFO
    return "grpc" not in sys.modules


def grpc_server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """For `server.add_secure_port`: a client needs a certificate of the cluster."""
    import grpc

    pair = (credentials.key_pem, credentials.cert_pem)
    return grpc.ssl_server_credentials([pair], root_certificates=credentials.ca_pem, require_client_auth=True)


def grpc_renewable_server_credentials(
    current: Callable[[], Credentials], begins: Callable[[], None] = lambda: None
) -> grpc.ServerCredentials:
    """As `grpc_server_credentials`, but each handshake uses what `current` gives then: a renewal needs no restart.

    gRPC asks before every handshake, one at a time, and hears "unchanged" as long as `current` gives the same object.
    A new configuration replaces what handshakes on other threads may be about to use: grpcio 1.85 was seen to abort the
    process (346 renewals under 3,600 connections a second). So the answer is held back until those who asked before
    have begun; nobody can ask meanwhile.

    Args:
        begins: told before each handshake, one at a time.
    """
    import grpc

    def configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
        pair = (credentials.key_pem, credentials.cert_pem)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=credentials.ca_pem)

    used = current()
    lock = threading.Lock()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        with lock:
            begins()
            newest = current()
            if newest is used:
                return None
            used = newest
            time.sleep(SETTLE_S)
            return configuration(newest)

    return grpc.dynamic_ssl_server_credentials(
        configuration(used),
        fetch,  # type: ignore[arg-type]  # None means unchanged, says its documentation
        require_client_authentication=True,
    )


def grpc_channel_credentials(credentials: Credentials, *, only: bytes | None = None) -> grpc.ChannelCredentials:
    """For `grpc.secure_channel`: trusts the cluster's authority only, and shows one's own certificate.

    Args:
        only: PEM of the one server certificate to trust instead: gRPC takes a certificate itself as the end of a chain
            (measured), and so a channel can be bound to a certificate that was checked against the list of revoked.
    """
    import grpc

    return grpc.ssl_channel_credentials(only or credentials.ca_pem, credentials.key_pem, credentials.cert_pem)


def channel_options(worker_name: str) -> list[tuple[str, str]]:
    """Options with which gRPC checks that it reached the worker of that name, instead of the host in the address.

    The certificate's `<name>.worker.titan.internal` then counts: the identity is the certificate, and an address that
    changed since it was issued does no harm. Without these options gRPC checks the host, as `--host` named it.
    """
    return [("grpc.ssl_target_name_override", tls_name(worker_name, Role.WORKER))]


def server_ssl_context(credentials: Credentials) -> ssl.SSLContext:
    """TLS 1.3 only; a client needs a certificate of the cluster."""
    return _context(ssl.PROTOCOL_TLS_SERVER, credentials)


def client_ssl_context(credentials: Credentials) -> ssl.SSLContext:
    """TLS 1.3 only; the server needs a certificate of the cluster that is good for `server_hostname`.

    `server_hostname` may be a host, an IP address or a worker's `tls_name`.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials)


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    try:
        context.load_verify_locations(cadata=credentials.ca_pem.decode("ascii"))
        renew_context(context, credentials)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise CertificateInvalid(
            f"{credentials.cert_path} or its key changed while it was read ({error})", "Start again"
        ) from error
    return context


def renew_context(context: ssl.SSLContext, credentials: Credentials) -> None:
    """Have later handshakes of `context` use what the files of `credentials` hold now: certificate, key, revoked.

    A revoked peer then gets the alert `certificate_revoked`. Connections that are open already stay open.

    Raises:
        OSError: a file cannot be read. CertificateInvalid: the list cannot be trusted.
    """
    context.load_cert_chain(credentials.cert_path, credentials.key_path)
    if load_revocations(credentials.ca_path, credentials.ca_pem).number:
        context.load_verify_locations(cafile=credentials.ca_path.with_name(LIST_FILE))  # the newest counts
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF


def peer_identity(auth_context: Mapping[str, Any]) -> Identity:
    """Who is at the other end of a gRPC call: `peer_identity(context.auth_context())` in a servicer.

    Args:
        auth_context: names to lists of bytes (gRPC's own annotation says bytes).

    Raises:
        CertificateInvalid: no TLS, older than TLS 1.3, or a certificate that names no member of a cluster.
    """
    certificates = list(auth_context.get("x509_pem_cert", ()))
    if len(certificates) != 1:
        raise CertificateInvalid("the peer showed no certificate", "Connect with a certificate of this cluster")
    version = b"".join(auth_context.get("ssl_tls_version", ()))
    if version != b"TLSv1.3":
        shown = version.decode("ascii", "replace") or "an unknown version"
        raise CertificateInvalid(f"the peer's connection uses {shown}", "Connect with TLS 1.3")
    return parse_identity(certificates[0])


_CAUSES = (
    (r"HOSTNAME_MISMATCH|IP_ADDRESS_MISMATCH|Hostname mismatch|IP address mismatch|Hostname Verification", "host"),
    (r"certificate has expired|verify_code: 10\b", "peer expired"),
    (r"not yet valid", "peer early"),
    (
        r"ALERT_UNKNOWN_CA|ALERT_CERTIFICATE_REQUIRED|ALERT_BAD_CERTIFICATE|ALERT_DECRYPT_ERROR|UNKNOWN_CERTIFICATE",
        "refused",
    ),
    (r"ALERT_CERTIFICATE_REVOKED", "own revoked"),
    (r"certificate revoked|CERTIFICATE_REVOKED", "peer revoked"),
    (r"ALERT_CERTIFICATE_EXPIRED", "own expired"),
    (r"ALERT_PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL|NO_SHARED_CIPHER|ALERT_HANDSHAKE_FAILURE", "version"),
    (r"CERTIFICATE_VERIFY_FAILED|unable to get|self.signed", "foreign"),
    (r"WRONG_VERSION_NUMBER|HTTP_REQUEST|RECORD_LAYER_FAILURE|PACKET_LENGTH|not an? SSL", "plaintext"),
    (r"Connection refused", "nobody"),
    (r"EOF|Socket closed|Connection reset|Broken pipe", "closed"),
)


def explain_tls_failure(address: str, error: Exception | str, *, peer: Identity | None = None) -> WorkerUnreachable:
    """What a failed TLS handshake with `address` means, in words.

    Args:
        error: an `ssl.SSLError` or another error of the handshake, or gRPC's `details()`.
        peer: who answered, when that is known.
    """
    text = str(error)
    kind = next((kind for pattern, kind in _CAUSES if re.search(pattern, text, re.IGNORECASE)), "other")
    host = split_address(address)[0]
    if peer is not None and kind in ("host", "other") and not host_matches(peer, host):
        listed = ", ".join(peer.hosts) or "no host"
        return WorkerUnreachable(
            f"{address} answered as {peer}, whose certificate is good for {listed}, not for {host}",
            f"Issue it again with `--host {host}` added, or use one of its hosts in hosts.yaml",
        )
    if peer is not None and kind == "peer expired":
        cause = f"the certificate of {peer} at {address} expired on {show_time(peer.not_after)}"
        return WorkerUnreachable(cause, f"Issue it again: `titan certs issue {peer.name} --role {peer.role} … --force`")
    facts = {"address": address, "host": host, "error": text[:200] or type(error).__name__}
    cause, mend = _SENTENCES[kind]
    return WorkerUnreachable(cause.format(**facts), mend.format(**facts))


_SENTENCES = {
    "host": (
        "the certificate at {address} is not good for {host}",
        "Issue it again with `--host {host}` added, or use one of its hosts in hosts.yaml",
    ),
    "peer expired": ("the certificate at {address} has expired", "Issue it again with `titan certs issue … --force`"),
    "peer early": ("the certificate at {address} is not valid yet", "Set the clocks of both machines"),
    "refused": (
        "{address} does not accept this machine's certificate",
        "Use certificates of one cluster on both sides (`titan certs show`)",
    ),
    "own revoked": (
        "{address} says that this machine's certificate was revoked",
        "Issue a new one on the machine that holds the authority",
    ),
    "peer revoked": (
        "the certificate at {address} was revoked",
        "If the machine is to take part again, give it a new one with `titan enroll`",
    ),
    "own expired": (
        "{address} says that this machine's certificate has expired",
        "Compare the clocks, or issue the certificate again with `titan certs issue … --force`",
    ),
    "version": ("{address} does not speak TLS 1.3", "Run the same version of Titan on both machines"),
    "foreign": (
        "the certificate at {address} was not issued by this cluster's authority",
        "Check that this is the machine you mean, and that it uses certificates of this cluster",
    ),
    "plaintext": (
        "{address} answers, but does not speak TLS: it is not a Titan worker",
        "Check host and port, and which program listens there",
    ),
    "nobody": ("nothing listens at {address}", "Start titan-worker there, or correct host and port"),
    "closed": (
        "{address} closed the connection during the TLS handshake",
        "See the worker's log; certificates of another cluster are the usual reason (`titan certs show`)",
    ),
    "other": ("the TLS handshake with {address} failed ({error})", "Check that a Titan worker listens there"),
}
