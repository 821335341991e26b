"""What worker and coordinator say to each other before the worker has a certificate. Knows sockets, no file.

The worker listens with a certificate that it has just made for this purpose, over TLS 1.3. A person carries a one-time
code from its screen to the coordinator. Both sides then prove over that connection that they know the code:

    worker       EnrolChallenge   nonce
    coordinator  EnrolProof       nonce, HMAC(K, "coordinator", nonces)
    worker       EnrolRequest     HMAC(K, "worker", nonces, request), request: the public key to be signed
    coordinator  EnrolGrant       HMAC(K, "grant", nonces, ca, certificate, list of revoked), and these
    worker       EnrolDone        HMAC(K, "done", nonces, certificate)

with K = scrypt(code, salt = SHA-256 of the worker's bootstrap certificate). K binds every proof to the TLS connection:
a man in the middle has to show a certificate of his own, and what the coordinator proves to him is worth nothing to
the worker. A proof lets him guess codes at home; the code's 95 bits are out of reach. The coordinator proves first, so
that a stranger who asks a worker learns nothing to guess with, and every wrong proof costs one of the code's tries.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from titan.common.config.hosts import NAME_PATTERN
from titan.common.errors import EnrolmentRefused, WorkerTimeout
from titan.proto.titan.v1 import trust_pb2 as pb

VERSION = 1
ALPN = "titan-enrol/1"
NONCE_BYTES = 32
MAX_MESSAGE_BYTES = 512 * 1024  # a grant carries ca.pem and a list of revoked
MAX_EARLY_BYTES = 4096  # before the other side has proved anything
MAX_WORDS = 300
_LENGTH = struct.Struct(">I")
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "maxmem": 64 << 20, "dklen": 32}

M = TypeVar("M", bound=Message)


def derive_key(code: str, bootstrap_certificate: bytes) -> bytes:
    """K of one code and one bootstrap certificate (DER). Takes some 50 ms and 16 MiB: once a code, not once a peer."""
    salt = hashlib.sha256(bootstrap_certificate).digest()
    return hashlib.scrypt(code.encode("ascii"), salt=salt, **_SCRYPT)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, what: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the purpose and the parts, each with its length before it."""
    proof = hmac.new(key, b"titan enrolment 1", hashlib.sha256)
    for part in (what.encode("ascii"), *parts):
        proof.update(_LENGTH.pack(len(part)) + part)
    return proof.digest()


def proved(mac: bytes, key: bytes, what: str, *parts: bytes) -> bool:
    """Whether `mac` is that proof; takes the same time for every wrong one."""
    return hmac.compare_digest(mac, prove(key, what, *parts))


def send(connection: socket.socket, message: Message, deadline: float) -> None:
    """Send one message. OSError when the connection breaks, WorkerTimeout after `deadline` (time.monotonic)."""
    data = message.SerializeToString()
    connection.settimeout(_left(deadline))
    try:
        connection.sendall(_LENGTH.pack(len(data)) + data)
    except TimeoutError:
        raise _too_slow() from None


def receive(connection: socket.socket, kind: type[M], deadline: float, *, limit: int = MAX_MESSAGE_BYTES) -> M:
    """One message of that kind.

    Raises:
        EnrolmentRefused: it is longer than `limit`, no such message, or the other side closed the connection.
        WorkerTimeout: it was not complete at `deadline`, however it trickled in.
        OSError: the connection broke.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if length > limit:
        raise EnrolmentRefused(f"the other side announced {length} bytes where {limit} are the most")
    return decode(_exactly(connection, length, deadline), kind)


def decode(data: bytes, kind: type[M]) -> M:
    """A message from its bytes; EnrolmentRefused when they are none."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise EnrolmentRefused("the other side sent what is no message of an enrolment") from error
    return message


def check_challenge(challenge: pb.EnrolChallenge) -> None:
    """Raise EnrolmentRefused unless this side can answer."""
    if challenge.version != VERSION or len(challenge.nonce) != NONCE_BYTES:
        raise EnrolmentRefused(
            f"the worker enrols by version {challenge.version} of the protocol, this machine by {VERSION}",
            "Install the same version of titan-moe on both",
        )


def suggested_name(words: str) -> str:
    """A certificate's name made of a host name; `worker` when nothing is left of it."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in words.partition(".")[0].lower())
    name = kept.strip("-")[:63].strip("-")
    return name if NAME_PATTERN.fullmatch(name) else "worker"


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_left(deadline))
        try:
            part = connection.recv(min(count - len(data), 65_536))
        except TimeoutError:
            raise _too_slow() from None
        if not part:
            raise EnrolmentRefused("the other side closed the connection")
        data += part
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _too_slow()
    return left


def _too_slow() -> WorkerTimeout:
    return WorkerTimeout("the other side took too long", "Try again")
