"""A worker's certificate and its list of revoked ones while it serves: the service `titan.v1.Trust`.

A new list and a new certificate take effect at once, for gRPC and for lanes, without a restart. Knows sessions only so
far as to end them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import wraps

import grpc
import mlx.core as mx

from titan.common.errors import EnrolmentRefused, TitanError
from titan.common.log import get_logger
from titan.common.log_limit import WINDOW_S, LimitedLog
from titan.common.metrics import Tally
from titan.common.security.credentials import Credentials
from titan.common.security.files import PRIVATE, PUBLIC, NewFile, locked_folder, write_together
from titan.common.security.own import OwnCertificate, ending
from titan.common.security.request import KeyRequest, check_answer, new_request
from titan.common.security.revocation import Revocations, require_not_revoked
from titan.common.security.tls import grpc_renewable_server_credentials, renew_context, server_ssl_context
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.proto.titan.v1 import trust_pb2 as pb
from titan.proto.titan.v1 import trust_pb2_grpc as pb_grpc
from titan.worker.gate import ERROR_CODE_KEY, Gate

log = get_logger("worker.trust")

LOOK_EVERY_S = 1.0
SAY_EVERY_S = 24 * 3600.0
KEY_LIFE_S = 120.0


def _answers(handler: Callable) -> Callable:
    """Turn a TitanError into a gRPC status with its sentence."""

    @wraps(handler)
    def wrapped(self: WorkerTrust, request: object, context: grpc.ServicerContext) -> object:
        try:
            return handler(self, request, context)
        except TitanError as error:
            self.refusals.add("trust", error.code)
            log.warning("request refused", peer=context.peer(), error=str(error))
            context.set_trailing_metadata(((ERROR_CODE_KEY, error.code),))
            context.abort(grpc.StatusCode[error.grpc_status], str(error))

    return wrapped


class WorkerTrust(pb_grpc.TrustServicer):
    """State of one worker process.

    Args:
        credentials: what it starts with.
        expel: told the names of coordinators whose certificates have just been revoked.
        refusals: counts calls that are refused, by whom and why.

    Attributes:
        handshakes: how many have begun on the port for gRPC.
    """

    def __init__(self, credentials: Credentials, expel: Callable[[set[str]], None], refusals: Tally) -> None:
        self.own = OwnCertificate(credentials)
        self.refusals = refusals
        self.handshakes = self._silent = self._called = 0
        self.revocations = Revocations(credentials.ca_path, credentials.ca_pem)
        self.strangers = LimitedLog(log)
        self.gate = Gate(self.revocations, refusals, self.strangers)
        self.lane_context = server_ssl_context(credentials)
        self._lanes_use = credentials
        self._expel = expel
        self._enforced = self.revocations.current
        self._pending: tuple[KeyRequest, float] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="titan-trust", daemon=True)
        self._thread.start()

    @property
    def credentials(self) -> Credentials:
        """In force now; another object once another certificate is."""
        return self.own.current

    def serve_on(self, server: grpc.Server, address: str) -> int:
        """Add the service, and a port that later handshakes find with the newest certificate; the port bound.

        Raises:
            RuntimeError: gRPC cannot listen there.
        """
        pb_grpc.add_TrustServicer_to_server(self, server)
        return server.add_secure_port(
            address, grpc_renewable_server_credentials(lambda: self.credentials, self._handshake_begins)
        )

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self._count_silent()
        self.strangers.close()

    def _handshake_begins(self) -> None:
        self.handshakes += 1  # one at a time

    # the service ----------------------------------------------------------------------------------------------------

    @_answers
    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:  # noqa: ARG002
        return pb.DescribeReply(
            unix_time_s=time.time(),
            software_version=SOFTWARE_VERSION,
            mlx_version=MLX_VERSION,
            device=str(mx.default_device().type).rpartition(".")[2],
            certificate_expires_s=int(self.credentials.identity.not_after.timestamp()),
            revocation_number=self.revocations.current.number,
        )

    @_answers
    def SyncRevocations(
        self, request: pb.SyncRevocationsRequest, context: grpc.ServicerContext
    ) -> pb.SyncRevocationsReply:
        if request.list_pem and self.revocations.offer(request.list_pem, context.peer()):
            log.info("list of revoked certificates taken", number=self.revocations.current.number, peer=context.peer())
            self._enforce()
        current = self.revocations.current
        newer = current.pem if current.pem != request.list_pem else b""
        return pb.SyncRevocationsReply(number=current.number, list_pem=newer)

    @_answers
    def NewKey(self, request: pb.NewKeyRequest, context: grpc.ServicerContext) -> pb.NewKeyReply:  # noqa: ARG002
        made = new_request(self.credentials.identity.name)
        with self._lock:
            self._pending = (made, time.monotonic() + KEY_LIFE_S)
        return pb.NewKeyReply(request_pem=made.request_pem)

    @_answers
    def InstallCertificate(
        self,
        request: pb.InstallCertificateRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> pb.InstallCertificateReply:
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None or pending[1] <= time.monotonic():
                raise EnrolmentRefused("no key waits for a certificate", "Ask for a new key first")
            old, made = self.credentials, pending[0]
            identity = check_answer(request.certificate_pem, old.ca_pem, made, name=old.identity.name)
            require_not_revoked(identity, self.revocations.current)
            with locked_folder(old.cert_path.parent):
                write_together(
                    [
                        NewFile(old.key_path, made.key_pem, PRIVATE),
                        NewFile(old.cert_path, request.certificate_pem, PUBLIC),
                    ]
                )
            self._take_certificate()
            if self.own.problem:
                raise EnrolmentRefused(f"the new certificate is not used: {self.own.problem}")
        return pb.InstallCertificateReply(expires_s=int(identity.not_after.timestamp()))

    def _take_certificate(self) -> None:
        """Use what lies on disk for new connections. With the lock."""
        if self.own.refresh():
            log.info("certificate renewed", until=f"{self.credentials.identity.not_after:%Y-%m-%d}")
        if self._lanes_use is not self.credentials:
            renew_context(self.lane_context, self.credentials)
            self._lanes_use = self.credentials

    # revocation -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """What was copied beside ca.pem, a list or a certificate, counts as if it had been sent."""
        said: dict[str, str] = {}
        counted, looked, seen = time.monotonic(), 0.0, None
        while not self._stop.wait(LOOK_EVERY_S):
            now = time.monotonic()
            self.strangers.tick()
            if now - counted > WINDOW_S:
                counted = now
                self._count_silent()
            if self.revocations.refresh():
                self._enforce()
            try:
                with self._lock:
                    self._take_certificate()
            except (TitanError, OSError) as error:
                log.error(f"lanes do not use the new certificate yet: {error}")
            if self.credentials is not seen or now - looked > SAY_EVERY_S:
                looked, seen = now, self.credentials
                if sentence := ending(self.credentials.identity, str(self.credentials.cert_path)):
                    log.warning(sentence, host=socket.gethostname())
            problems = {"list of revoked certificates": self.revocations.problem, "certificate": self.own.problem}
            for what, problem in problems.items():
                if problem and problem != said.get(what):
                    log.error(f"the {what} on disk is not used: {problem}")
            said = problems

    def _count_silent(self) -> None:
        """Say how many connections have made no call. gRPC tells nobody why; a worker greeted in good order has one of
        these for each that makes calls, since a coordinator looks at the certificate first."""
        handshakes, called = self.handshakes, self.gate.connections
        silent, talking = handshakes - called - self._silent, called - self._called
        self._silent, self._called = handshakes - called, called
        if silent > talking:
            log.warning(
                "connections that made no call: strangers, or a certificate that is not good here", count=silent
            )

    def _enforce(self) -> None:
        """End what those do here who have just been revoked, and keep them from coming back."""
        with self._lock:
            current = self.revocations.current
            fresh = current.serials - self._enforced.serials
            self._enforced = current
            if not fresh:
                return
            names = self.gate.end_calls(fresh)
            try:
                renew_context(self.lane_context, self.credentials)
            except (TitanError, OSError) as error:
                log.error(f"lanes do not know the new list of revoked certificates yet: {error}")
        if names:
            log.warning("certificates revoked, their sessions are ended", names=", ".join(sorted(names)))
            self._expel(names)
        if self.credentials.identity.serial in fresh:
            log.error("this worker's own certificate was revoked: no coordinator will use it until it is enrolled anew")
