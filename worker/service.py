"""The gRPC service of a worker: checks who asks and what, then hands over to sessions, holdings and the MLX thread.

Every handler answers with a named error or a result; none raises into gRPC. Knows no file and no command line.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from functools import wraps

import grpc
import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES, compute_dtype
from titan.common.errors import (
    EngineFailed,
    TitanError,
    WireError,
    WorkerDraining,
    WorkerOverloaded,
    WorkerRefused,
)
from titan.common.experts import Fill
from titan.common.log import get_logger
from titan.common.platform import process_memory_bytes
from titan.common.registry.shape import ModelShape
from titan.common.security.identity import Identity, Role, require_role
from titan.common.security.tls import peer_identity
from titan.common.units import format_bytes
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.common.wire.codec import decode_call, encode_result
from titan.common.wire.messages import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, ExecuteCall, ExecuteResult
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1 import worker_pb2_grpc as pb_grpc
from titan.worker.engine import JOB_TIMEOUT_S, MLXThread
from titan.worker.holdings import Holdings
from titan.worker.install import Progress, pushed_fill
from titan.worker.sessions import Session, Sessions

log = get_logger("worker")

ERROR_CODE_KEY = "titan-error"  # trailing metadata: TitanError.code
ASSIGN_LOCK_TIMEOUT_S = 30.0
PROGRESS_EVERY_S = 0.2
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
        checkpoint: shape and reader of the worker's own copy of the model, if it has one.
    """

    def __init__(
        self, name: str, mlx_thread: MLXThread, budget_bytes: int, checkpoint: tuple[ModelShape, Fill] | None = None
    ) -> None:
        self.name = name
        self.worker_id = secrets.token_hex(8)
        self.budget_bytes = budget_bytes
        self.sessions = Sessions()
        self.draining = False
        self.started = time.monotonic()
        self.requests = self.pairs = self.refused = 0
        self._mlx = mlx_thread
        self._checkpoint = checkpoint
        self._holdings: Holdings | None = None
        self._lock = threading.Lock()

    # Hello ----------------------------------------------------------------------------------------------------------

    @_answers
    def Hello(self, request: pb.HelloRequest, context: grpc.ServicerContext) -> pb.HelloReply:
        coordinator = self._coordinator(context)
        self._refuse_when_draining()
        if request.protocol_version != PROTOCOL_VERSION:
            raise WorkerRefused(
                f"worker {self.name} speaks protocol {PROTOCOL_VERSION} (Titan {SOFTWARE_VERSION}), coordinator "
                f"{coordinator.name} speaks {request.protocol_version} (Titan {request.software_version[:32]})",
                "install the same version of titan-moe on both",
            )
        if request.mlx_version != MLX_VERSION:
            raise WorkerRefused(
                f"worker {self.name} runs mlx {MLX_VERSION}, coordinator {coordinator.name} runs mlx "
                f"{request.mlx_version[:32]}: their kernels may differ in the last bits",
                "install the same version of mlx on both",
            )
        if not 8 <= len(request.instance_id) <= 64:
            raise WireError("instance_id is not 8 to 64 characters")
        holdings = self._agree(request, coordinator)
        session = self.sessions.open(coordinator.name, request.instance_id, context.peer())
        log.info("session opened", coordinator=coordinator.name, epoch=session.epoch, peer=context.peer())
        return pb.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            software_version=SOFTWARE_VERSION,
            session=pb.Session(id=session.id, epoch=session.epoch),
            memory_budget_bytes=holdings.budget_bytes,
            has_checkpoint=self._checkpoint is not None,
            max_message_bytes=MAX_MESSAGE_BYTES,
            worker_id=self.worker_id,
            device=str(mx.default_device().type).rpartition(".")[2],
        )

    def _agree(self, request: pb.HelloRequest, coordinator: Identity) -> Holdings:
        """The holdings for the model that the coordinator named; refuses another model than the one in use."""
        shape = ModelShape.from_json(request.model_shape)
        if self._checkpoint is not None and self._checkpoint[0].fingerprint != shape.fingerprint:
            own = self._checkpoint[0]
            raise WorkerRefused(
                f"worker {self.name} has a {own.family} checkpoint {own.fingerprint[:12]}, coordinator "
                f"{coordinator.name} serves a {shape.family} checkpoint {shape.fingerprint[:12]}",
                "start titan-worker with the same model, or without --model so that it receives its experts",
            )
        floats = {c.dtype for layer in shape.layers for m in layer.matrices for c in m.components if c.dtype[0] != "U"}
        own_dtype = compute_dtype(floats)
        if request.compute_dtype not in COMPUTE_DTYPES or request.compute_dtype != own_dtype:
            raise WorkerRefused(
                f"worker {self.name} computes in {own_dtype}, coordinator {coordinator.name} in "
                f"{request.compute_dtype[:16]}",
                "use machines with the same kind of device",
            )
        with self._lock:
            current = self._holdings
            if current is not None and current.shape.fingerprint == shape.fingerprint:
                if current.shape != shape:
                    raise WorkerRefused("the model shape differs from the one this fingerprint had before")
                return current
            if current is not None:
                others = [s for s in self.sessions.live() if s.coordinator != coordinator.name and s.streams > 0]
                if others:
                    raise WorkerRefused(
                        f"worker {self.name} serves model {current.shape.fingerprint[:12]} for coordinator "
                        f"{others[0].coordinator!r}",
                        "stop that one first: a worker holds one model at a time",
                    )
                for session in self.sessions.live():
                    self.sessions.close(session)
                self._mlx.run(mx.clear_cache)
            self._holdings = Holdings(shape, own_dtype, self.budget_bytes, self._mlx)
            return self._holdings

    # Assign ---------------------------------------------------------------------------------------------------------

    def Assign(
        self, request_iterator: Iterator[pb.AssignRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AssignProgress]:
        try:
            first = next(request_iterator, None)
            if first is None or first.WhichOneof("kind") != "assignment":
                raise WireError("the first message of Assign is not an assignment")
            session = self._session(first.assignment.session, context)
            yield from self._install(session, first.assignment, request_iterator)
        except TitanError as error:
            self.refuse(context, error)

    def _install(
        self, session: Session, assignment: pb.Assignment, parts: Iterator[pb.AssignRequest]
    ) -> Iterator[pb.AssignProgress]:
        holdings = self._current()
        if not holdings.installing.acquire(timeout=ASSIGN_LOCK_TIMEOUT_S):
            raise WorkerOverloaded(f"worker {self.name} is installing experts for another coordinator", "try later")
        try:
            wanted: dict[int, frozenset[int]] = {}
            for entry in assignment.residency:
                wanted[entry.layer] = wanted.get(entry.layer, frozenset()) | frozenset(entry.experts)
            holdings.check(wanted)
            union = dict(wanted)
            for other in self.sessions.live():
                if other is not session and other.streams > 0:
                    for layer, experts in other.assigned.items():
                        union[layer] = union.get(layer, frozenset()) | experts
            steps = holdings.plan(union)
            sizes = {step.layer: holdings.shape.layer(step.layer).expert_bytes for step in steps}
            progress = Progress(
                sum(len(step.missing) for step in steps), sum(len(s.missing) * sizes[s.layer] for s in steps)
            )
            needed = []
            if self._checkpoint is None:
                needed = [pb.LayerExperts(layer=s.layer, experts=s.missing) for s in steps if s.missing]
            yield progress.message(needed=needed)
            fill = self._checkpoint[1] if self._checkpoint is not None else pushed_fill(holdings.shape, parts)
            last = time.monotonic()
            for step in steps:
                targets = holdings.begin(step)
                filled = False
                try:
                    for expert in step.missing:
                        fill(step.layer, expert, targets[expert])
                        progress.add(sizes[step.layer])
                        if time.monotonic() - last > PROGRESS_EVERY_S:
                            last = time.monotonic()
                            yield progress.message()
                    filled = True
                finally:  # also when the peer goes away and the generator is closed
                    if filled:
                        holdings.finish(step)
                    else:
                        holdings.abandon(step)
            session.assigned = wanted
            log.info(
                "experts installed",
                coordinator=session.coordinator,
                experts=holdings.expert_count,
                resident=format_bytes(holdings.resident_bytes),
                read=format_bytes(progress.bytes_total),
            )
            yield progress.message(installed=True)
        finally:
            holdings.installing.release()

    # Execute --------------------------------------------------------------------------------------------------------

    def Execute(
        self, request_iterator: Iterator[pb.ExecuteRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ExecuteReply]:
        session: Session | None = None
        try:
            coordinator = self._coordinator(context)
            for request in request_iterator:
                try:
                    if session is None:
                        session = self._session(request.session, context)
                        self.sessions.begin_stream(session)
                    self.sessions.get(request.session.id, request.session.epoch, coordinator.name)
                    reply = encode_result(self._execute(request))
                except TitanError as error:
                    self.refused += 1
                    reply = pb.ExecuteReply(
                        request_id=request.request_id, failure=pb.Failure(code=error.code, message=str(error))
                    )
                yield reply
        except TitanError as error:
            self.refuse(context, error)
        finally:
            if session is not None and session.streams > 0:
                self.sessions.end_stream(session)

    def _execute(self, request: pb.ExecuteRequest) -> ExecuteResult:
        self._refuse_when_draining()
        holdings = self._current()
        call = decode_call(
            request,
            hidden_size=holdings.shape.hidden_size,
            num_experts=holdings.shape.num_experts,
            dtype=holdings.compute_dtype,
        )
        self.requests += 1
        self.pairs += len(call.pair_rows)
        queued = time.perf_counter()

        def work() -> ExecuteResult:
            started = time.perf_counter()
            result = holdings.execute(call)
            return ExecuteResult(result.request_id, result.outputs, int((started - queued) * 1e6), result.compute_us)

        return self._wait(work, call.deadline_s or None)

    def _wait(self, work: Callable[[], ExecuteResult], deadline_s: float | None) -> ExecuteResult:
        future = self._mlx.submit(work, deadline_s=deadline_s)
        try:
            return future.result(JOB_TIMEOUT_S)
        except FutureTimeout:
            future.cancel()
            raise EngineFailed(f"worker {self.name} has not finished a request in {JOB_TIMEOUT_S:.0f} s") from None
        except (ValueError, RuntimeError, MemoryError) as error:
            log.error("executing experts failed", exc_info=True)
            raise EngineFailed(f"worker {self.name} could not execute ({error})") from error

    # Probe, Status, Drain -------------------------------------------------------------------------------------------

    @_answers
    def Probe(self, request: pb.ProbeRequest, context: grpc.ServicerContext) -> pb.ProbeReply:
        self._session(request.session, context)
        holdings = self._current()
        rows, a_row, repeats = request.rows, request.pairs_a_row, request.repeats
        if not (1 <= rows <= MAX_PROBE_ROWS and 1 <= a_row <= 64 and 1 <= repeats <= MAX_PROBE_REPEATS):
            raise WireError(f"a probe of {rows} rows, {a_row} pairs a row, {repeats} times is out of bounds")
        held = sorted(holdings.held(request.layer))
        if not held:
            raise WorkerRefused(f"worker {self.name} holds no expert of layer {request.layer}", "probe another layer")
        bits = COMPUTE_DTYPES[holdings.compute_dtype][0]
        call = ExecuteCall(
            request_id=0,
            layer=request.layer,
            activations=np.zeros((rows, holdings.shape.hidden_size), bits),
            pair_rows=np.repeat(np.arange(rows, dtype=np.uint32), a_row),
            pair_experts=np.resize(np.array(held, np.uint32), rows * a_row),
            sort=rows * a_row >= 64,
            deadline_s=JOB_TIMEOUT_S,
        )
        times = [self._wait(lambda: holdings.execute(call), None).compute_us for _ in range(repeats)]
        return pb.ProbeReply(compute_us=times)

    @_answers
    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:  # noqa: ARG002
        self._identity(context)
        holdings = self._holdings
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
            requests=self.requests,
            pairs=self.pairs,
            refused=self.refused,
            uptime_s=time.monotonic() - self.started,
        )

    @_answers
    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        session = self._session(request.session, context)
        self.sessions.close(session)
        waiting = self._mlx.queued
        self._mlx.run(lambda: None)  # jobs run in order: what was queued before has been answered
        log.info("session drained", coordinator=session.coordinator, epoch=session.epoch)
        return pb.DrainReply(finished=waiting)

    # ----------------------------------------------------------------------------------------------------------------

    def refuse(self, context: grpc.ServicerContext, error: TitanError) -> None:
        """Answer with the error's status and sentence. Ends the handler: gRPC's abort raises."""
        self.refused += 1
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

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise WorkerDraining(f"worker {self.name} is shutting down", "wait until it is started again")


__all__ = ["ERROR_CODE_KEY", "WorkerService"]
