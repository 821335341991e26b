"""Every parser that reads what comes from outside, as a function of bytes. It may return, or raise a TitanError.

Anything else that it raises is a finding, and so is memory or time out of proportion.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from fixtures.certificates import Cluster, make_cluster
from fuzz.mutate import damaged_message
from google.protobuf.message import DecodeError, Message

from titan.common.config import load_hosts, read_api_key
from titan.common.errors import TitanError
from titan.common.registry import open_checkpoint
from titan.common.registry.shape import ModelShape
from titan.common.security import Role, enrolment, load_credentials
from titan.common.security.codes import new_code, parse_code
from titan.common.security.identity import parse_identity
from titan.common.security.request import new_request, read_request
from titan.common.security.revocation import parse_revocations
from titan.common.security.revoke import revoke
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.common.wire.messages import PROTOCOL_VERSION
from titan.deploy import DEMO_MODEL
from titan.placement import Node, Plan
from titan.proto.titan.v1 import trust_pb2 as trust
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.worker.engine import MLXThread
from titan.worker.gate import Gate
from titan.worker.service import WorkerService
from titan.worker.trust import WorkerTrust

HOSTS = b"""model: m
coordinator: {memory: 12GiB, listen: "127.0.0.1:8080"}
workers:
- name: mini
  addresses: [10.0.0.2, "[fe80::1%en0]:7077"]
  memory: 1.5GB
timeouts: {execute: 250ms}
"""
WORDS = (
    b"model", b"workers", b"addresses", b"timeouts", b"8GiB", b"250ms", b"&a", b"*a", b"!!python/object:x", b"---",
    b"<<", b"version", b"residency", b"slots", b"nodes", b"fingerprint", b"-----BEGIN CERTIFICATE-----", b"-----END",
    b"titan://",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A parser.

    Args:
        corpus: inputs that it takes, to be damaged.
        run: parses; TitanErrors stay inside.
    """

    name: str
    corpus: tuple[bytes, ...]
    run: Callable[[bytes], None]


class Aborted(Exception):
    """What a handler's `context.abort` ends in."""


class Context:
    """As much of gRPC's context as handlers use."""

    def __init__(self, certificate: bytes) -> None:
        self._auth = {"x509_pem_cert": [certificate], "ssl_tls_version": [b"TLSv1.3"]}

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._auth

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    def cancel(self) -> None:
        pass

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert isinstance(code, grpc.StatusCode)
        assert details
        raise Aborted


@contextlib.contextmanager
def targets() -> Iterator[dict[str, Target]]:
    """All of them, over throw-away certificates and a worker's service without sockets."""
    with tempfile.TemporaryDirectory(
        prefix="titan-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as name:
        folder = Path(name)
        cluster = make_cluster(folder / "certs")
        mlx = MLXThread()
        try:
            made = [*_files(folder), *_certificates(folder, cluster), *_messages(cluster), _handlers(cluster, mlx)]
            yield {target.name: target for target in made}
        finally:
            mlx.close(10)


def _guarded(parse: Callable[[bytes], object]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        with contextlib.suppress(TitanError):
            parse(data)

    return run


def _from_file(path: Path, read: Callable[[Path], object], mode: int = 0o600) -> Callable[[bytes], object]:
    path.write_bytes(b"")
    path.chmod(mode)

    def parse(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return parse


def _files(folder: Path) -> list[Target]:
    plan = Plan(
        fingerprint="0" * 64,
        num_experts=4,
        top_k=2,
        layers=(0, 1),
        expert_bytes=(1000, 1000),
        nodes=(Node("coordinator", 1 << 20, compute_s=0.0), Node("mini", 1 << 20, compute_s=1e-5)),
        residency=(((0,), (1,), (0, 1), ()), ((0,), (0,), (1,), (1,))),
        slots=((4, 4), (2, 2)),
    )
    plan.validate()
    key = b"0123456789abcdef0123456789abcdef\n"
    return [
        Target("hosts.yaml", (HOSTS, b"model: m\n"), _guarded(_from_file(folder / "hosts.yaml", load_hosts))),
        Target(
            "plan", (plan.to_json().encode(),), _guarded(lambda data: Plan.from_json(data.decode(errors="replace")))
        ),
        Target("api key file", (key, b"x" * 512), _guarded(_from_file(folder / "api.key", read_api_key))),
        Target(
            "one-time code",
            tuple(new_code().encode() for _ in range(8)),
            _guarded(lambda data: parse_code(data.decode(errors="replace"))),
        ),
    ]


def _certificates(folder: Path, cluster: Cluster) -> list[Target]:
    member = cluster.member("mini")
    cluster.member("gone")
    listed = revoke(cluster.authority, "gone").revocations
    request = new_request("mini").request_pem
    ca_pem = cluster.authority_pem
    paths = [folder / "certs" / name for name in ("fuzz-ca.pem", "fuzz.pem", "fuzz.key")]
    whole = [ca_pem, member.cert_pem, member.key_pem]
    for path, content in zip(paths, whole, strict=True):
        path.write_bytes(content)
        path.chmod(0o600)

    def credentials(data: bytes) -> object:
        which = data[0] % 3 if data else 0
        paths[which].write_bytes(data[1:])
        try:
            return load_credentials(*paths)
        finally:
            paths[which].write_bytes(whole[which])

    return [
        Target(
            "certificate",
            (member.cert_pem, _der(member.cert_pem), _der(ca_pem)),
            _guarded(_wrapped("", parse_identity)),
        ),
        Target("credentials", tuple(bytes([i]) + part for i, part in enumerate(whole)), _guarded(credentials)),
        Target(
            "revocation list",
            (listed.pem, _der(listed.pem)),
            _guarded(_wrapped("X509 CRL", lambda data: parse_revocations(data, ca_pem, "the list"))),
        ),
        Target(
            "signing request",
            (request, _der(request)),
            _guarded(_wrapped("CERTIFICATE REQUEST", lambda data: read_request(data, "mini"))),
        ),
    ]


def _der(pem: bytes) -> bytes:
    return base64.b64decode(b"".join(pem.splitlines()[1:-1]))


def _wrapped(label: str, parse: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Damage inside PEM's base64 rarely gets past it: damaged DER is wrapped again."""

    def run(data: bytes) -> object:
        if label and not data.startswith(b"-----"):
            body = base64.encodebytes(data).decode()
            data = f"-----BEGIN {label}-----\n{body}-----END {label}-----\n".encode()
        return parse(data)

    return run


def _small_shape() -> ModelShape:
    shape = open_checkpoint(DEMO_MODEL).shape
    return replace(shape, layers=shape.layers[:1])


def _messages(cluster: Cluster) -> list[Target]:
    shape = _small_shape().to_json().encode()
    kinds: tuple[type[Message], ...] = (
        trust.EnrolChallenge, trust.EnrolProof, trust.EnrolRequest, trust.EnrolGrant, trust.EnrolDone,
    )  # fmt: skip
    nonce, mac = enrolment.new_nonce(), bytes(32)
    samples = (
        trust.EnrolChallenge(version=1, nonce=nonce),
        trust.EnrolProof(nonce=nonce, mac=mac),
        trust.EnrolRequest(mac=mac, request_pem=new_request("mini").request_pem, name="mini"),
        trust.EnrolGrant(mac=mac, ca_pem=cluster.authority_pem, certificate_pem=cluster.member("x").cert_pem),
        trust.EnrolDone(mac=mac, refusal="no"),
    )

    def enrol(data: bytes) -> object:
        message = enrolment.decode(data[1:], kinds[data[0] % len(kinds)] if data else kinds[0])
        if isinstance(message, trust.EnrolChallenge):
            enrolment.check_challenge(message)
        elif isinstance(message, trust.EnrolRequest):
            name = enrolment.suggested_name(message.name)
            assert 1 <= len(name) <= 63
            read_request(message.request_pem, name)
        elif isinstance(message, (trust.EnrolProof, trust.EnrolDone)):
            assert not enrolment.proved(message.mac, b"k" * 32, "done", message.mac)
        return message

    return [
        Target("model shape", (shape,), _guarded(lambda data: ModelShape.from_json(data.decode(errors="replace")))),
        Target(
            "enrolment message",
            tuple(bytes([i]) + sample.SerializeToString() for i, sample in enumerate(samples)),
            _guarded(enrol),
        ),
    ]


def _handlers(cluster: Cluster, mlx: MLXThread) -> Target:
    """Every call of both services, behind the gate, with whatever message: a result or a status, never an exception."""
    coordinator = cluster.member("coordinator", Role.COORDINATOR, [])
    worker = cluster.member("host")
    service = WorkerService("host", mlx, 1 << 20)
    own = WorkerTrust(worker, lambda _names: None, service.refusals)
    shape = _small_shape()
    hello = pb.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        software_version=SOFTWARE_VERSION,
        mlx_version=MLX_VERSION,
        instance_id="0123456789abcdef",
        model_shape=shape.to_json(),
        compute_dtype="float32",
    )
    context: Any = Context(coordinator.cert_pem)
    session = service.Hello(hello, context).session
    hidden = shape.hidden_size
    execute = pb.ExecuteRequest(
        session=session, request_id=1, layer=shape.layers[0].index, rows=1, activations=bytes(4 * hidden),
        pair_rows=bytes(4), pair_experts=bytes(4), deadline_us=1,
    )  # fmt: skip
    hint = pb.PrefetchRequest(session=session, layer=shape.layers[0].index, reads=1, experts=[0, 1])
    residency = [pb.LayerExperts(layer=shape.layers[0].index, experts=[0])]
    assign = pb.AssignRequest(assignment=pb.Assignment(session=session, residency=residency))
    calls: tuple[tuple[str, Any, Any, type[Message], Message], ...] = (
        ("unary", service, service.Hello, pb.HelloRequest, hello),
        ("stream", service, service.Assign, pb.AssignRequest, assign),
        ("stream", service, service.Execute, pb.ExecuteRequest, execute),
        ("unary", service, service.Prefetch, pb.PrefetchRequest, hint),
        ("unary", service, service.Probe, pb.ProbeRequest, pb.ProbeRequest(session=session, rows=1, repeats=1)),
        ("unary", service, service.Status, pb.StatusRequest, pb.StatusRequest()),
        ("unary", service, service.Drain, pb.DrainRequest, pb.DrainRequest(session=pb.Session(id="x", epoch=1))),
        ("unary", own, own.Describe, trust.DescribeRequest, trust.DescribeRequest()),
        ("unary", own, own.SyncRevocations, trust.SyncRevocationsRequest, trust.SyncRevocationsRequest(list_pem=b"x")),
        ("unary", own, own.NewKey, trust.NewKeyRequest, trust.NewKeyRequest()),
        (
            "unary", own, own.InstallCertificate, trust.InstallCertificateRequest,
            trust.InstallCertificateRequest(certificate_pem=worker.cert_pem),
        ),
    )  # fmt: skip
    gate = Gate(own.revocations, service.refusals, own.strangers)

    def guarded(kind: str, handler: Any) -> Any:
        made: Any = grpc.unary_unary_rpc_method_handler if kind == "unary" else grpc.stream_stream_rpc_method_handler
        details: Any = SimpleNamespace(method="/titan.v1.Worker/Any")
        wrapped = gate.intercept_service(lambda _details: made(handler), details)
        assert wrapped is not None
        return wrapped.unary_unary or wrapped.stream_stream

    behaviours = [guarded(kind, handler) for kind, _, handler, _, _ in calls]

    part = pb.AssignRequest(part=pb.ExpertPart(layer=shape.layers[0].index, expert=0, data=bytes(64)))

    def make_live(request: Any) -> None:
        """Give a request the session that is open now: most damage is to be found behind that check."""
        if not service.sessions.live():
            service.Hello(hello, context)
        now = service.sessions.live()[0]
        holder = request.assignment if isinstance(request, pb.AssignRequest) else request
        if isinstance(holder, (pb.Assignment, pb.ExecuteRequest, pb.PrefetchRequest, pb.ProbeRequest)):
            holder.session.id, holder.session.epoch = now.id, now.epoch

    def run(data: bytes) -> None:
        which = data[0] % len(calls) if data else 0
        kind, _, _, message, sample = calls[which]
        by_field = data[-1:] > b"\x60"  # what is damaged byte by byte seldom parses
        request: Any = None
        try:
            request = damaged_message(random.Random(data), sample) if by_field else message.FromString(data[1:])
        except DecodeError:
            return  # gRPC answers that itself
        if len(data) % 4:
            make_live(request)
        with contextlib.suppress(Aborted):
            if kind == "unary":
                behaviours[which](request, context)
            else:
                list(behaviours[which](iter([request, part if message is pb.AssignRequest else request]), context))

    corpus = tuple(bytes([i]) + sample.SerializeToString() for i, (*_, sample) in enumerate(calls))
    return Target("worker's calls", corpus, run)
