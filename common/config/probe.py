"""Who answers at a worker's address: name, TCP, TLS, identity, each failure told apart. Knows no application message.

`titan hosts check` takes any `Prober`: `probe_status` has one that goes on to ask the worker how it is.
"""

from __future__ import annotations

import errno
import queue
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from titan.common.config.address import split_address
from titan.common.config.hosts import Worker
from titan.common.errors import CertificateInvalid, TitanError, WorkerTimeout, WorkerUnreachable
from titan.common.security.credentials import Credentials
from titan.common.security.identity import Identity, Role, host_matches, parse_identity
from titan.common.security.tls import client_ssl_context, explain_tls_failure
from titan.common.units import format_seconds

Status = Literal[
    "ok", "name_unknown", "refused", "unreachable", "timed_out", "tls_failed", "wrong_role", "wrong_name", "wrong_host",
    "status_failed",
]  # fmt: skip
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EADDRNOTAVAIL, errno.EPERM, errno.EACCES}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one address gave.

    Args:
        cause, mend: of the failure; empty when `status` is "ok".
        peer: who answered, when TLS came that far.
        details: what a prober with an application message learned (model, memory, version), for people.
    """

    worker: str
    address: str
    status: Status
    cause: str = ""
    mend: str = ""
    peer: Identity | None = None
    seconds: float = 0.0
    details: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"


Prober = Callable[[Worker, str, Credentials], ProbeResult]


class ProbeFailed(Exception):
    """What went wrong at an address, with the sentence for it. Ends in this module or in `common.security.channel`."""

    def __init__(self, status: Status, error: TitanError, peer: Identity | None = None) -> None:
        self.status: Status = status
        self.error = error
        self.peer = peer
        super().__init__(str(error))


def tls_prober(timeout_s: float) -> Prober:
    """A prober that goes as far as TLS, each address within `timeout_s`."""

    def probe(worker: Worker, address: str, credentials: Credentials) -> ProbeResult:
        return probe_tls(worker, address, credentials, timeout_s=timeout_s)

    return probe


def probe_tls(worker: Worker, address: str, credentials: Credentials, *, timeout_s: float) -> ProbeResult:
    """Resolve, connect, shake hands, and compare who answered with what hosts.yaml says. Raises nothing for a peer."""
    start = time.monotonic()
    peer: Identity | None = None
    try:
        peer = handshake(address, credentials, timeout_s=timeout_s).identity
        compare_name(peer, worker.name, address)
        _compare_host(peer, address)
    except ProbeFailed as failure:
        cause, mend = failure.error.cause, failure.error.mend
        who = failure.peer or peer
        return ProbeResult(worker.name, address, failure.status, cause, mend, who, time.monotonic() - start)
    return ProbeResult(worker.name, address, "ok", peer=peer, seconds=time.monotonic() - start)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who answered at an address, and the certificate that says so."""

    identity: Identity
    certificate: bytes = field(repr=False)  # DER


def handshake(address: str, credentials: Credentials, *, timeout_s: float) -> Peer:
    """Connect, show one's certificate, and look at the other's: of this cluster, within its dates and not revoked.

    Raises:
        ProbeFailed: as its `status` says; neither name nor role nor host have been compared with anything.
        CertificateInvalid: one's own files changed, or the list of revoked certificates cannot be trusted.
    """
    deadline = time.monotonic() + timeout_s
    context = client_ssl_context(credentials)
    context.check_hostname = False  # the caller compares, to say who answered instead
    context.set_alpn_protocols(["h2"])  # a gRPC server closes connections without it
    with connect(address, deadline, timeout_s) as plain:
        return _shake_hands(context, plain, address, deadline, timeout_s)


def connect(address: str, deadline: float, timeout_s: float) -> socket.socket:
    """A TCP connection to `address`, trying each IP address its name has, until `deadline` (monotonic seconds)."""
    host, port = split_address(address)
    failure: ProbeFailed | None = None
    for family, kind, protocol, _, target in _resolve(host, port, address, deadline, timeout_s):
        plain = socket.socket(family, kind, protocol)
        try:
            plain.settimeout(_left(deadline, address, timeout_s))
            plain.connect(target)
        except OSError as error:
            plain.close()
            failure = _connection_failure(error, address, host, port, timeout_s)
        except ProbeFailed:
            plain.close()
            raise
        else:
            return plain
    raise failure or _name_unknown(host, "it has no address")


def _resolve(host: str, port: int, address: str, deadline: float, timeout_s: float) -> list:
    """`getaddrinfo` with a deadline. It cannot be interrupted: one that hangs holds a daemon thread till it ends."""
    answers: queue.SimpleQueue[list | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True, name=f"resolve-{host}").start()
    try:
        answer = answers.get(timeout=_left(deadline, address, timeout_s))
    except queue.Empty:
        raise ProbeFailed(
            "timed_out",
            WorkerTimeout(
                f"looking up {host} took longer than {format_seconds(timeout_s)}",
                "Check the name server, or use an IP address in hosts.yaml",
            ),
        ) from None
    if isinstance(answer, list):
        return answer
    reason = answer.strerror if isinstance(answer, OSError) and answer.strerror else str(answer)
    raise _name_unknown(host, reason)


def _name_unknown(host: str, reason: str) -> ProbeFailed:
    mend = "Correct the name, or use an IP address; names of Macs end in .local"
    return ProbeFailed("name_unknown", WorkerUnreachable(f"the name {host} is not known here ({reason})", mend))


def _left(deadline: float, address: str, timeout_s: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _timed_out(address, timeout_s)
    return left


def _timed_out(address: str, timeout_s: float) -> ProbeFailed:
    cause = f"{address} did not answer within {format_seconds(timeout_s)}"
    mend = "Check that the machine is awake and on this network, and that its firewall lets this port in"
    return ProbeFailed("timed_out", WorkerTimeout(cause, mend))


def _connection_failure(error: OSError, address: str, host: str, port: int, timeout_s: float) -> ProbeFailed:
    if isinstance(error, TimeoutError):
        return _timed_out(address, timeout_s)
    if isinstance(error, ConnectionRefusedError):
        cause = f"{host} is there, but nothing listens on port {port}"
        return ProbeFailed("refused", WorkerUnreachable(cause, "Start titan-worker there, or correct the port"))
    mend = "Check cable or Wi-Fi, and that both machines are on one network"
    if error.errno in _NO_ROUTE and sys.platform == "darwin":
        mend += "; on macOS allow the terminal under Privacy & Security > Local Network"
    cause = f"{address} cannot be reached ({error.strerror or error})"
    return ProbeFailed("unreachable", WorkerUnreachable(cause, mend))


def _shake_hands(
    context: ssl.SSLContext, plain: socket.socket, address: str, deadline: float, timeout_s: float
) -> Peer:
    """The other end, once it has taken our certificate too.

    In TLS 1.3 a client is done before the server has looked at its certificate; a gRPC server then speaks first.
    """
    peer: Identity | None = None
    try:
        plain.settimeout(_left(deadline, address, timeout_s))
        with context.wrap_socket(plain, server_hostname=split_address(address)[0].partition("%")[0]) as secure:
            certificate = secure.getpeercert(binary_form=True) or b""
            peer = parse_identity(certificate)
            secure.settimeout(_left(deadline, address, timeout_s))
            if not secure.recv(1):
                raise ConnectionResetError("EOF")
            return Peer(peer, certificate)
    except TimeoutError:
        raise _timed_out(address, timeout_s) from None
    except CertificateInvalid as error:
        raise ProbeFailed("tls_failed", error) from error
    except OSError as error:  # SSLError is one
        raise ProbeFailed("tls_failed", explain_tls_failure(address, error), peer) from error


def compare_name(peer: Identity, name: str, address: str) -> None:
    """Raise ProbeFailed unless the worker called `name` answered."""
    if peer.role is not Role.WORKER:
        cause = f"{address} answered as {peer}, which is not a worker"
        raise ProbeFailed("wrong_role", WorkerUnreachable(cause, "Correct the address in hosts.yaml"), peer)
    if peer.name != name:
        cause = f"{address} answered as {peer}, but hosts.yaml calls it {name}"
        mend = "Correct the name or the address in hosts.yaml, or issue the certificate under the right name"
        raise ProbeFailed("wrong_name", WorkerUnreachable(cause, mend), peer)


def _compare_host(peer: Identity, address: str) -> None:
    host = split_address(address)[0]
    if not host_matches(peer, host):
        raise ProbeFailed("wrong_host", explain_tls_failure(address, "hostname mismatch", peer=peer), peer)
