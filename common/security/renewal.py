"""Renewal of a worker's certificate over its channel: it makes the new key, this machine signs. Knows no command."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import grpc
from cryptography.hazmat.primitives.serialization import Encoding

from titan.common.security.authority import DEFAULT_DAYS, Authority, sign
from titan.common.security.channel import CheckedChannel, trust_error
from titan.common.security.credentials import key_fits
from titan.common.security.files import PUBLIC, NewFile, locked_folder, write_together
from titan.common.security.identity import Identity, Role, parse_identity
from titan.common.security.ledger import record
from titan.common.security.request import read_request
from titan.proto.titan.v1 import trust_pb2 as pb
from titan.proto.titan.v1.trust_pb2_grpc import TrustStub

SOON = timedelta(days=30)


def due(identity: Identity, *, now: datetime | None = None) -> bool:
    """Whether the certificate ends within 30 days."""
    return identity.not_after - (now or datetime.now(UTC)) < SOON


def worn(identity: Identity, *, now: datetime | None = None) -> bool:
    """Whether a daemon that can should renew it by itself: it is due, and two thirds of its life are over."""
    now = now or datetime.now(UTC)
    return due(identity, now=now) and identity.not_after - now < (identity.not_after - identity.not_before) / 3


def renew_worker(
    channel: CheckedChannel, authority: Authority, *, days: int = DEFAULT_DAYS, timeout_s: float = 10.0
) -> Identity:
    """Give the worker behind `channel` a new certificate for a new key, with the name and the hosts it had.

    This machine's copy of the certificate is replaced. A key of that name here, from `titan certs issue`, is removed
    when it belongs to the certificate that is no longer used.

    Raises:
        ClusterError, SecurityError: the worker does not answer or refuses; a folder cannot be written. The worker then
            goes on with the certificate it has.
    """
    old, stub = channel.peer, TrustStub(channel.channel)
    try:
        request = stub.NewKey(pb.NewKeyRequest(), timeout=timeout_s)
        key = read_request(request.request_pem, str(old))
        certificate = sign(authority, key, old.name, role=Role.WORKER, hosts=old.hosts, days=days)
        record(authority.folder, certificate)
        cert_pem = certificate.public_bytes(Encoding.PEM)
        stub.InstallCertificate(pb.InstallCertificateRequest(certificate_pem=cert_pem), timeout=timeout_s)
    except grpc.RpcError as error:
        raise trust_error(error, old, "a new certificate") from error
    with locked_folder(authority.folder):
        write_together([NewFile(authority.folder / f"{old.name}.pem", cert_pem, PUBLIC)])
        key_path = authority.folder / f"{old.name}.key"
        if key_path.exists() and not key_fits(certificate, key_path):
            key_path.unlink()
    return parse_identity(certificate)
