"""Opening one session with one worker: Hello over the first address that answers, Assign with progress, Probe.

Every wait has a deadline. Knows the steps, not when to take them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Thread

import grpc

from titan.common.config.hosts import Timeouts, Worker
from titan.common.errors import (
    ClusterError,
    SecurityError,
    TitanError,
    WorkerBadReply,
    WorkerLost,
    WorkerRefused,
    WorkerTimeout,
    WorkerUnreachable,
)
from titan.common.registry.shape import ModelShape
from titan.common.security.channel import CheckedChannel, open_channel, sync_revocations
from titan.common.security.credentials import Credentials
from titan.common.security.revocation import Revocations, require_not_revoked
from titan.common.units import format_seconds
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.common.wire.messages import MAX_MESSAGE_BYTES, PART_BYTES, PROTOCOL_VERSION
from titan.coordinator.remote.share import Share
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1.worker_pb2_grpc import WorkerStub

# read_bytes(layer, expert): its components as they are on disk, one after another
ReadBytes = Callable[[int, int], bytearray]

POWER_S = 10.0  # measuring power takes about one second, and up to five where a tool is asked
MAX_POWER_W = 1e5

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an install is."""

    experts_done: int
    experts_total: int
    bytes_done: int
    bytes_total: int


class Connection:
    """A channel to a worker with an open session. `close` ends it.

    Args:
        credentials: what the channel was opened with.
    """

    def __init__(
        self,
        worker: Worker,
        address: str,
        checked: CheckedChannel,
        revocations: Revocations,
        hello: pb.HelloReply,
        credentials: Credentials,
    ) -> None:
        self.worker = worker
        self.address = address
        self.hello = hello
        self.credentials = credentials
        self.revocations = revocations
        self.checked = checked
        self.stub = WorkerStub(checked.channel)
        self.opened_s = time.monotonic()

    def check_trust(self, theirs: int, timeout_s: float) -> None:
        """Look whether certificates were revoked since; whoever has the newer list hands it on.

        Args:
            theirs: number of the worker's list.

        Raises:
            CertificateRevoked: the worker's, or one's own. ClusterError, SecurityError: it does not take the list.
        """
        self.revocations.refresh()
        require_not_revoked(self.checked.peer, self.revocations.current)  # before it is told anything
        if theirs != self.revocations.current.number:
            sync_revocations(self.checked, self.revocations, timeout_s=timeout_s)
            require_not_revoked(self.checked.peer, self.revocations.current)
        require_not_revoked(self.credentials.identity, self.revocations.current)

    def close(self) -> None:
        self.checked.channel.close()


def greet(
    worker: Worker,
    credentials: Credentials,
    timeouts: Timeouts,
    shape: ModelShape,
    dtype: str,
    instance_id: str,
    *,
    reduced: bool = False,
) -> Connection:
    """Say Hello to a worker, at its addresses in turn, after both sides have the newest list of revoked certificates.

    Args:
        reduced: requests of the session will carry scores.

    Raises:
        WorkerUnreachable: no address answered as this worker; the sentence says why for each.
        WorkerRefused, SecurityError: an address answered and one side refused.
    """
    request = pb.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        software_version=SOFTWARE_VERSION,
        mlx_version=MLX_VERSION,
        instance_id=instance_id,
        model_shape=shape.to_json(),
        compute_dtype=dtype,
        reduced=reduced,
    )
    reasons = []
    revocations = Revocations(credentials.ca_path, credentials.ca_pem)
    for address in worker.addresses:
        try:
            checked = open_channel(
                worker.name, address, credentials, timeout_s=timeouts.connect, options=CHANNEL_OPTIONS
            )
        except ClusterError as error:
            reasons.append(error.cause)
            continue
        channel = checked.channel
        try:
            sync_revocations(checked, revocations, timeout_s=timeouts.connect + timeouts.probe)
            require_not_revoked(checked.peer, revocations.current)
            require_not_revoked(credentials.identity, revocations.current)
            reply = WorkerStub(channel).Hello(request, timeout=timeouts.hello)
            _check_hello(worker, reply, reduced)
        except grpc.RpcError as error:
            channel.close()
            refusal = from_rpc_error(error, worker.name, "Hello")
            if isinstance(refusal, (WorkerRefused, SecurityError)):
                raise refusal from error
            reasons.append(f"{address}: {refusal.cause}")
        except (WorkerUnreachable, WorkerTimeout) as error:
            channel.close()
            reasons.append(f"{address}: {error.cause}")
        except BaseException:
            channel.close()
            raise
        else:
            return Connection(worker, address, checked, revocations, reply, credentials)
    raise WorkerUnreachable(
        f"worker {worker.name} cannot be reached: {'; '.join(reasons)}",
        "start titan-worker there and check with `titan hosts check`",
    )


def _check_hello(worker: Worker, reply: pb.HelloReply, reduced: bool) -> None:
    if reply.protocol_version != PROTOCOL_VERSION:
        raise WorkerRefused(
            f"worker {worker.name} speaks protocol {reply.protocol_version} (Titan {reply.software_version[:32]}), "
            f"this coordinator speaks {PROTOCOL_VERSION} (Titan {SOFTWARE_VERSION})",
            "install the same version of titan-moe on both",
        )
    if reduced and not reply.reduced:
        raise WorkerRefused(
            f"worker {worker.name} (Titan {reply.software_version[:32]}) does not know wire precision `reduced`",
            "install the same version of titan-moe on both, or set `precision: exact`",
        )
    if not reply.session.id or len(reply.session.id) > 64 or not 0 < len(reply.worker_id) <= 64:
        raise WorkerBadReply(f"worker {worker.name} answered Hello without a session")


def install(
    connection: Connection,
    share: Share,
    read_bytes: ReadBytes,
    idle_timeout_s: float,
    on_progress: Callable[[Progress], None],
    stopped: Callable[[], bool],
) -> Share:
    """Have a worker hold and serve exactly `share`; pushes the experts that it asks for.

    Returns the share as it is there: a worker that serves what it keeps of what it is sent may have no room for all.

    Raises:
        WorkerTimeout: no progress for `idle_timeout_s`.
        WorkerBadReply: its slot tables do not map what it was given, or it does not serve what it is to serve.
        WorkerLost, WorkerRefused, MemoryBudgetError: as the worker says.
    """
    name = connection.worker.name
    held: dict[int, frozenset[int]] = {}
    served: dict[int, frozenset[int]] = {}
    needed: Queue[list[tuple[int, int]] | None] = Queue()
    stream = connection.stub.Assign(_assign_messages(connection, share, read_bytes, needed))
    messages: Queue[pb.AssignProgress | grpc.RpcError | None] = Queue()
    reader = Thread(target=_drain_stream, args=(stream, messages), name=f"titan-assign-{name}", daemon=True)
    reader.start()
    installed = False
    waited_since = time.monotonic()
    try:
        while True:
            try:
                message = messages.get(timeout=0.25)
            except Empty:
                if stopped():
                    raise WorkerLost(f"installing on worker {name} was interrupted") from None
                if time.monotonic() - waited_since > idle_timeout_s:
                    raise WorkerTimeout(
                        f"worker {name} made no progress installing experts for {format_seconds(idle_timeout_s)}",
                        "look at its log; raise timeouts.assign_idle when its disk is that slow",
                    ) from None
                continue
            waited_since = time.monotonic()
            if stopped():
                raise WorkerLost(f"installing on worker {name} was interrupted")
            if isinstance(message, grpc.RpcError):
                raise from_rpc_error(message, name, "Assign")
            if message is None:
                break
            if message.needed:
                needed.put([(entry.layer, e) for entry in message.needed for e in entry.experts])
            on_progress(Progress(message.experts_done, message.experts_total, message.bytes_done, message.bytes_total))
            if message.installed:
                installed = True
                needed.put(None)
                held = {entry.layer: frozenset(entry.experts) for entry in message.held}
                served = {entry.layer: frozenset(entry.experts) for entry in message.serves}
        if not installed:
            raise WorkerBadReply(f"worker {name} ended Assign before everything was installed")
        _check_held(name, share.pinned, held, "its slot table lacks")
        if connection.hello.has_checkpoint:
            _check_held(name, {i: cache.experts for i, cache in share.caches.items()}, served, "it does not serve")
        return share.serving(served)
    finally:
        stream.cancel()
        needed.put(None)
        reader.join(timeout=5)


def _check_held(name: str, wanted: Mapping[int, Sequence[int]], held: Mapping[int, frozenset[int]], words: str) -> None:
    """What the worker says it has must be what it was given."""
    for layer, experts in wanted.items():
        absent = set(experts) - held.get(layer, frozenset())
        if absent:
            raise WorkerBadReply(
                f"worker {name} says it installed layer {layer}, but {words} experts {sorted(absent)[:8]}"
            )


def _assign_messages(
    connection: Connection,
    share: Share,
    read_bytes: ReadBytes,
    needed: Queue[list[tuple[int, int]] | None],
) -> Iterator[pb.AssignRequest]:
    yield pb.AssignRequest(
        assignment=pb.Assignment(
            session=connection.hello.session,
            residency=[pb.LayerExperts(layer=layer, experts=experts) for layer, experts in share.pinned.items()],
            caches=[pb.LayerCache(layer=i, slots=c.slots, experts=c.experts) for i, c in share.caches.items()],
        )
    )
    asked = {(layer, e) for layer, experts in share.pinned.items() for e in experts}
    if not connection.hello.has_checkpoint:  # it keeps what it is to read later
        asked |= {(layer, e) for layer, cache in share.caches.items() for e in cache.experts}
    for batch in iter(needed.get, None):
        for layer, expert in batch:
            if (layer, expert) not in asked:
                return  # not ours to give, or given before; the worker's Assign then fails by itself
            asked.remove((layer, expert))
            data = read_bytes(layer, expert)
            for offset in range(0, len(data), PART_BYTES):
                piece = bytes(data[offset : offset + PART_BYTES])
                yield pb.AssignRequest(part=pb.ExpertPart(layer=layer, expert=expert, offset=offset, data=piece))


def _drain_stream(stream: Iterator[pb.AssignProgress], messages: Queue) -> None:
    try:
        for message in stream:
            messages.put(message)
    except grpc.RpcError as error:
        messages.put(error)
    else:
        messages.put(None)


def probe_pair_s(connection: Connection, layer: int, top_k: int, timeout_s: float) -> float:
    """Measured seconds a (row, expert) pair on this worker: median of five calls of one row."""
    request = pb.ProbeRequest(session=connection.hello.session, layer=layer, rows=1, pairs_a_row=top_k, repeats=5)
    try:
        reply = connection.stub.Probe(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise from_rpc_error(error, connection.worker.name, "Probe") from error
    times = sorted(reply.compute_us)
    if not times:
        raise WorkerBadReply(f"worker {connection.worker.name} answered Probe without figures")
    return times[len(times) // 2] / 1e6 / top_k


def probe_power_w(connection: Connection, layer: int, top_k: int, timeout_s: float) -> float | None:
    """Package power of this worker while it computes (P_n), in watts; None where its system does not tell."""
    request = pb.ProbeRequest(
        session=connection.hello.session, layer=layer, rows=1, pairs_a_row=top_k, repeats=1, power=True
    )
    try:
        reply = connection.stub.Probe(request, timeout=timeout_s + POWER_S)
    except grpc.RpcError as error:
        raise from_rpc_error(error, connection.worker.name, "Probe") from error
    known = reply.HasField("power_w") and 0 <= reply.power_w <= MAX_POWER_W  # not NaN either
    return reply.power_w if known else None


def from_rpc_error(error: grpc.RpcError, worker: str, call: str) -> TitanError:
    """The named error behind a gRPC failure; the worker's own sentence where it sent one."""
    if not isinstance(error, grpc.Call):
        return WorkerLost(f"{call} to worker {worker} failed ({error})")
    code, detail = error.code(), (error.details() or "")[:1000]
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return WorkerTimeout(f"worker {worker} did not answer {call} in time", "see whether it hangs or is overloaded")
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return SecurityError(f"worker {worker} refused {call}: {detail}")
    if code in (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
    ):
        return WorkerRefused(f"worker {worker} refused {call}: {detail}")
    name = code.name.lower() if code is not None else "unknown"
    return WorkerLost(f"{call} to worker {worker} failed ({name}: {detail})")


__all__ = [
    "Connection",
    "Progress",
    "from_rpc_error",
    "greet",
    "install",
    "probe_pair_s",
    "probe_power_w",
]
