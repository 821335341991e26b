"""The gRPC service of a worker: checks who asks and what, then hands over to sessions, holdings and execution.

Every handler answers with a named error or a result; none raises into gRPC. Knows no file and no command line.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from ssl import PEM_cert_to_DER_cert

import grpc
import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.errors import TitanError, WireError, WorkerDraining, WorkerRefused
from titan.common.execution import SORT_AT_PAIRS
from titan.common.log import get_logger
from titan.common.metrics import Tally
from titan.common.package_power import package_power_w
from titan.common.platform import process_memory_bytes
from titan.common.registry.shape import ModelShape
from titan.common.security.identity import Identity, Role, require_role
from titan.common.security.tls import peer_identity
from titan.common.versions import SOFTWARE_VERSION
from titan.common.wire.codec import decode_call, decode_hint, encode_result
from titan.common.wire.messages import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, ExecuteCall
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1 import worker_pb2_grpc as pb_grpc
from titan.worker.agreement import agree_on_model, check_versions
from titan.worker.assign import assign
from titan.worker.cache import ExpertCache
from titan.worker.engine import JOB_TIMEOUT_S, MLXThread
from titan.worker.execution import Execution, limits_of
from titan.worker.holdings import Holdings
from titan.worker.lane.listener import LaneListener
from titan.worker.lane.tokens import LaneTokens, certificate_hash
from titan.worker.own_copy import OwnCopy
from titan.worker.requests import RequestQueue
from titan.worker.sessions import Session, Sessions
from titan.worker.sources import Sources

log = get_logger("worker")

ERROR_CODE_KEY = "titan-error"  # trailing metadata: TitanError.code
MAX_PROBE_ROWS, MAX_PROBE_REPEATS = 256, 64


def _answers(handler: Callable) -> Callable:
    """Turn errors of a unary handler into a gRPC status with the error's sentence."""

    @wraps(handler)
    def wrapped(self: WorkerService, request: object, context: grpc.ServicerContext) -> object:
        try:
            return handler(self, request, context)
        except TitanError as error:
            return self.refuse(context, error)

    return wrapped


class WorkerService(pb_grpc.WorkerServicer):
    """State of one worker process.

    Args:
        name: this worker's name (its certificate's).
        mlx: the thread that owns MLX.
        budget_bytes: M_n.
        own: the worker's own copy of the model, if it has one.
        cache: keeps what was pushed, if it may.
        kept: makes of it something to read experts from when they are asked for.
    """

    def __init__(
        self,
        name: str,
        mlx_thread: MLXThread,
        budget_bytes: int,
        own: OwnCopy | None = None,
        cache: ExpertCache | None = None,
        kept: Callable[[ModelShape], OwnCopy] | None = None,
    ) -> None:
        self.name = name
        self.worker_id = secrets.token_hex(8)
        self.budget_bytes = budget_bytes
        self.sessions = Sessions()
        self.tokens = LaneTokens()
        self.execution = Execution(mlx_thread, self.sessions, lambda: self._holdings)
        self.lanes: LaneListener | None = None  # set when there is one
        self.revocation_number: Callable[[], int] = lambda: 0  # replaced by whoever keeps the list
        self.draining = False
        self.started = time.monotonic()
        self.refusals = Tally("by", "reason")
        self.cache = cache
        self.sources = Sources(own.read if own is not None else None, cache)
        self._mlx = mlx_thread
        self._own, self._kept = own, kept
        self._holdings: Holdings | None = None
        self._lock = threading.Lock()

    @property
    def holdings(self) -> Holdings | None:
        """What is held now; None before the first Hello."""
        return self._holdings

    @property
    def requests(self) -> RequestQueue:
        return self._mlx.requests

    def drain(self, timeout_s: float) -> None:
        """Refuse what comes from now on; what is under way is answered, within `timeout_s`."""
        self.draining = True
        if self.lanes is not None:
            self.lanes.close()
        self.execution.drain(timeout_s)

    # Hello ----------------------------------------------------------------------------------------------------------

    @_answers
    def Hello(self, request: pb.HelloRequest, context: grpc.ServicerContext) -> pb.HelloReply:
        coordinator = self._coordinator(context)
        if self.draining:
            raise WorkerDraining(f"worker {self.name} is shutting down", "wait until it is started again")
        check_versions(self.name, coordinator.name, request)
        own = self._own.shape if self._own is not None else None
        holdings = self._hold(
            coordinator, request.instance_id, *agree_on_model(self.name, coordinator.name, request, own)
        )
        session = self.sessions.open(coordinator.name, request.instance_id, context.peer(), reduced=request.reduced)
        self.execution.end_lanes(lambda old: not self.sessions.is_live(old))
        log.info("session opened", coordinator=coordinator.name, epoch=session.epoch, peer=context.peer())
        reply = pb.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            software_version=SOFTWARE_VERSION,
            session=pb.Session(id=session.id, epoch=session.epoch),
            memory_budget_bytes=holdings.budget_bytes,
            has_checkpoint=self._own is not None,
            cache_bytes=self.cache.limit_bytes if self.cache is not None and self._kept is not None else 0,
            max_message_bytes=MAX_MESSAGE_BYTES,
            worker_id=self.worker_id,
            reduced=session.reduced,
            device=str(mx.default_device().type).rpartition(".")[2],
        )
        if self.lanes is not None:
            reply.lane_port = self.lanes.port
            reply.lane_token = self.tokens.issue(session, certificate_hash(_certificate(context)))
        return reply

    @_answers
    def OpenLane(self, request: pb.OpenLaneRequest, context: grpc.ServicerContext) -> pb.OpenLaneReply:
        session = self._session(request.session, context)
        if self.draining:
            raise WorkerDraining(f"worker {self.name} is shutting down", "wait until it is started again")
        if self.lanes is None:
            return pb.OpenLaneReply()
        token = self.tokens.issue(session, certificate_hash(_certificate(context)))
        return pb.OpenLaneReply(lane_port=self.lanes.port, lane_token=token)

    def _hold(self, coordinator: Identity, instance_id: str, shape: ModelShape, dtype: str) -> Holdings:
        """The holdings for `shape`; refuses another model than the one that somebody else uses."""
        with self._lock:
            current = self._holdings
            if current is not None and current.shape.fingerprint == shape.fingerprint:
                if current.shape != shape:
                    raise WorkerRefused("the model shape differs from the one this fingerprint had before")
                return current
            if current is not None:
                me = (coordinator.name, instance_id)
                others = [s for s in self.sessions.live() if s.streams > 0 and (s.coordinator, s.instance_id) != me]
                if others:
                    raise WorkerRefused(
                        f"worker {self.name} serves model {current.shape.fingerprint[:12]} for coordinator "
                        f"{others[0].coordinator!r}",
                        "stop that one first: a worker holds one model at a time",
                    )
                for session in self.sessions.live():
                    self.sessions.close(session)
                self._mlx.run(mx.clear_cache)
            own = self._own or (self._kept(shape) if self._kept is not None else None)
            self._holdings = Holdings(shape, dtype, self.budget_bytes, self._mlx, own)
            return self._holdings

    # Assign, Execute ------------------------------------------------------------------------------------------------

    def Assign(
        self, request_iterator: Iterator[pb.AssignRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AssignProgress]:
        try:
            first = next(request_iterator, None)
            if first is None or first.WhichOneof("kind") != "assignment":
                raise WireError("the first message of Assign is not an assignment")
            session = self._session(first.assignment.session, context)
            others = [s for s in self.sessions.live() if s is not session and s.streams > 0]
            yield from assign(self._current(), session, others, first.assignment, request_iterator, self.sources)
        except TitanError as error:
            self.refuse(context, error)

    def Execute(
        self, request_iterator: Iterator[pb.ExecuteRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ExecuteReply]:
        session: Session | None = None
        try:
            coordinator = self._coordinator(context)
            for request in request_iterator:
                try:
                    named = self.sessions.get(request.session.id, request.session.epoch, coordinator.name)
                    if session is None:
                        self.sessions.begin_stream(named)
                        session = named
                    call = decode_call(request, limits_of(self._current(), named))
                    reply = encode_result(self.execution.run(call, named))
                    self.execution.answers.add("grpc", "ok")
                except TitanError as error:
                    self.execution.answers.add("grpc", error.code)
                    reply = pb.ExecuteReply(
                        request_id=request.request_id, failure=pb.Failure(code=error.code, message=str(error))
                    )
                yield reply
        except TitanError as error:
            self.refuse(context, error)
        finally:
            if session is not None:
                self.sessions.end_stream(session)

    @_answers
    def Prefetch(self, request: pb.PrefetchRequest, context: grpc.ServicerContext) -> pb.PrefetchReply:
        session = self._session(request.session, context)
        self.execution.hint(decode_hint(request, limits_of(self._current(), session)), session)
        self._mlx.poller.wake()
        return pb.PrefetchReply()

    # Probe, Status, Drain -------------------------------------------------------------------------------------------

    @_answers
    def Probe(self, request: pb.ProbeRequest, context: grpc.ServicerContext) -> pb.ProbeReply:
        session = self._session(request.session, context)
        holdings = self._current()
        rows, a_row, repeats = request.rows, request.pairs_a_row, request.repeats
        if not (1 <= rows <= MAX_PROBE_ROWS and 1 <= a_row <= 64 and 1 <= repeats <= MAX_PROBE_REPEATS):
            raise WireError(f"a probe of {rows} rows, {a_row} pairs a row, {repeats} times is out of bounds")
        held = sorted(holdings.held(request.layer) or holdings.served(request.layer))
        if not held:
            raise WorkerRefused(f"worker {self.name} holds no expert of layer {request.layer}", "probe another layer")
        bits = COMPUTE_DTYPES[holdings.compute_dtype][0]
        call = ExecuteCall(
            request_id=0,
            layer=request.layer,
            activations=np.zeros((rows, holdings.shape.hidden_size), bits),
            pair_rows=np.repeat(np.arange(rows, dtype=np.uint32), a_row),
            pair_experts=np.resize(np.array(held, np.uint32), rows * a_row),
            sort=rows * a_row >= SORT_AT_PAIRS,
            deadline_s=JOB_TIMEOUT_S,
        )
        times = [self.execution.run(call, session).compute_us for _ in range(repeats)]
        reply = pb.ProbeReply(compute_us=times)
        if request.power:
            power_w = package_power_w(lambda: self.execution.run(call, session))
            if power_w is not None:
                reply.power_w = power_w
        return reply

    @_answers
    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:  # noqa: ARG002
        self._identity(context)
        holdings = self._holdings
        counts, answers = self.execution.lane_counts, self.execution.answers
        return pb.StatusReply(
            worker_id=self.worker_id,
            software_version=SOFTWARE_VERSION,
            state="draining" if self.draining else "ready",
            memory_budget_bytes=self.budget_bytes,
            expert_bytes=holdings.resident_bytes if holdings else 0,
            process_bytes=process_memory_bytes(),
            fingerprint=holdings.shape.fingerprint if holdings else "",
            experts=holdings.expert_count if holdings else 0,
            sessions=len(self.sessions.live()),
            requests=int(answers.total),
            pairs=self.execution.executed.pairs,
            refused=int(self.refusals.total + answers.total - answers.of("lane", "ok") - answers.of("grpc", "ok")),
            uptime_s=time.monotonic() - self.started,
            lanes=counts.open,
            lanes_refused=counts.refused,
            malformed_frames=counts.malformed,
            revocation_number=self.revocation_number(),
            cache=self._cache_status(),
        )

    def _cache_status(self) -> pb.CacheStatus:
        hints, holdings = self.execution.hints, self._holdings
        status = pb.CacheStatus(hints=hints.came, hints_unused=hints.unused)
        if holdings is not None:
            status.bytes = holdings.read_bytes
            status.slots = sum(holdings.cache_slots(spec.index) for spec in holdings.shape.layers)
            for counts in holdings.counts:
                status.hits += counts.hits
                status.misses += counts.misses
                status.loads += counts.loads - counts.installed
                status.prefetched += counts.prefetched
                status.useful += counts.useful
                status.late += counts.late
                status.stall_s += counts.stall_s
        return status

    @_answers
    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        session = self._session(request.session, context)
        self.sessions.close(session)
        waiting = self._mlx.requests.waiting(session.id)
        self._mlx.run(lambda: None)  # jobs and batches take turns: the batch under way ends before this
        while self._mlx.requests.waiting(session.id):
            self._mlx.run(lambda: None)
        log.info("session drained", coordinator=session.coordinator, epoch=session.epoch)
        return pb.DrainReply(finished=waiting)

    # ----------------------------------------------------------------------------------------------------------------

    def refuse(self, context: grpc.ServicerContext, error: TitanError) -> None:
        """Answer with the error's status and sentence. Ends the handler: gRPC's abort raises."""
        self.refusals.add("call", error.code)
        log.warning("request refused", peer=context.peer(), error=str(error))
        context.set_trailing_metadata(((ERROR_CODE_KEY, error.code),))
        context.abort(grpc.StatusCode[error.grpc_status], str(error))

    def _identity(self, context: grpc.ServicerContext) -> Identity:
        return peer_identity(context.auth_context())

    def _coordinator(self, context: grpc.ServicerContext) -> Identity:
        identity = self._identity(context)
        require_role(identity, Role.COORDINATOR)
        return identity

    def _session(self, named: pb.Session, context: grpc.ServicerContext) -> Session:
        return self.sessions.get(named.id, named.epoch, self._coordinator(context).name)

    def _current(self) -> Holdings:
        if self._holdings is None:
            raise WorkerRefused(f"worker {self.name} has no model yet", "say Hello first")
        return self._holdings


def _certificate(context: grpc.ServicerContext) -> bytes:
    """The peer's certificate, DER; `peer_identity` has found exactly one."""
    pem = b"".join(context.auth_context()["x509_pem_cert"])  # type: ignore[arg-type]  # the stubs say int
    return PEM_cert_to_DER_cert(pem.decode("ascii"))


__all__ = ["ERROR_CODE_KEY", "WorkerService"]
