"""Execute, whatever carries it: admission, the lanes of all sessions, and gRPC's way to wait for an outcome.

Knows transports and the MLX thread; not what experts are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from titan.common.errors import EngineFailed, TitanError, WorkerDraining, WorkerRefused
from titan.common.log import get_logger
from titan.common.metrics import Tally
from titan.common.wire.checks import Limits
from titan.common.wire.lane import LaneSocket
from titan.common.wire.messages import ExecuteCall, ExecuteResult, Hint
from titan.worker.engine import JOB_TIMEOUT_S, MLXThread
from titan.worker.hints import Hints
from titan.worker.holdings import Holdings
from titan.worker.lane.connection import LaneConnection
from titan.worker.lane.counts import LaneCounts
from titan.worker.requests import Request, arrival
from titan.worker.sessions import Session, Sessions

log = get_logger("worker")


@dataclass(slots=True)
class Executed:
    """What the MLX thread has done since start; `compute_s` and `load_s` count a kernel once, whoever shared it."""

    rows: int = 0
    pairs: int = 0
    compute_s: float = 0.0
    load_s: float = 0.0

    def add(self, calls: Sequence[ExecuteCall], outcomes: Sequence[ExecuteResult | TitanError]) -> None:
        shared: ExecuteResult | None = None
        for call, outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, ExecuteResult):
                shared = outcome
                self.rows += call.activations.shape[0]
                self.pairs += call.pair_rows.shape[0]
        if shared is not None:
            self.compute_s += shared.compute_us / 1e6
            self.load_s += shared.load_us / 1e6


class Execution:
    """Requests of all sessions.

    Args:
        holdings: the experts held now, or None before the first Hello.
    """

    def __init__(self, mlx_thread: MLXThread, sessions: Sessions, holdings: Callable[[], Holdings | None]) -> None:
        self.hints = Hints()
        self.lane_counts = LaneCounts()
        self.executed = Executed()
        self.answers = Tally("transport", "result")
        self._draining = False
        self._mlx, self._sessions, self._holdings = mlx_thread, sessions, holdings
        self._lanes: set[LaneConnection] = set()
        self._lock = threading.Lock()
        mlx_thread.serve(self._execute, self)

    def admit(self, request: Request) -> None:
        """Queue a request that the reader has read, or raise the TitanError that refuses it at once."""
        self._mlx.requests.put(request)

    def hint(self, hint: Hint | None, session: Session) -> None:
        """Take note of what a layer to come will probably ask for; None for a hint that is none."""
        if hint is None:
            self.hints.refuse()
        else:
            self.hints.put(session.id, hint)

    def run(self, call: ExecuteCall, session: Session) -> ExecuteResult:
        """Queue a call and wait for its outcome.

        Raises:
            TitanError: as the outcome is.
        """
        if self._draining:
            raise WorkerDraining("the worker is shutting down", "wait until it is started again")
        request = _WaitedRequest(call, session)
        self.admit(request)
        self._mlx.poller.wake()
        try:
            outcome = request.outcome.result(JOB_TIMEOUT_S)
        except FutureTimeout:
            raise EngineFailed(f"a request has not been finished in {JOB_TIMEOUT_S:.0f} s") from None
        if isinstance(outcome, TitanError):
            raise outcome
        return outcome

    # lanes ----------------------------------------------------------------------------------------------------------

    def open_lane(self, sock: LaneSocket, session: Session) -> None:
        """Serve an opened lane.

        Raises:
            WorkerOverloaded: the session has enough of them. SessionUnknown, WorkerDraining: it is over.
        """
        holdings = self._holdings()
        if holdings is None or not self._sessions.is_live(session):
            raise WorkerRefused("the session has been replaced", "say Hello again")
        if self._draining:
            raise WorkerDraining("the worker is shutting down", "wait until it is started again")
        self._sessions.begin_stream(session)
        limits = limits_of(holdings, session)
        lane = LaneConnection(
            sock, session, limits, self._sessions, self, self._mlx.poller, self.lane_counts, self.answers
        )
        with self._lock:
            self._lanes = {old for old in self._lanes if old.fileno() >= 0} | {lane}
        self.lane_counts.open += 1
        self._mlx.poller.add(lane)

    def end_lanes(self, condition: Callable[[Session], bool]) -> None:
        """End the lanes of sessions for which `condition` holds."""
        with self._lock:
            lanes = [lane for lane in self._lanes if condition(lane.session)]
        for lane in lanes:
            lane.interrupt()

    def drain(self, timeout_s: float) -> None:
        """Have the coordinators stop sending; returns when they have closed their lanes, or after `timeout_s`.

        What they send before they have read the announcement is answered: nothing under way is lost.
        """
        self._draining = True
        deadline = time.monotonic() + timeout_s
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.announce_draining()
        while self.lane_counts.open > 0 and time.monotonic() < deadline:
            time.sleep(0.01)

    # on the MLX thread ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.hints)

    def work(self) -> None:
        """Nothing waits: follow a hint."""
        hint, holdings = self.hints.take(), self._holdings()
        if hint is None or holdings is None:
            return
        try:
            used = holdings.prefetch(hint)
        except (TitanError, ValueError, RuntimeError, MemoryError) as error:
            log.warning(f"a hint could not be followed: {error}", layer=hint.layer)
            used = False
        self.hints.done(followed=used)

    def _execute(self, calls: Sequence[ExecuteCall]) -> Sequence[ExecuteResult | TitanError]:
        holdings = self._holdings()
        if holdings is None:
            return [WorkerRefused("no model is held here yet", "say Hello first")] * len(calls)
        self.hints.overtaken(calls[0].layer)
        outcomes = holdings.execute(calls)
        self.executed.add(calls, outcomes)
        return outcomes


def limits_of(holdings: Holdings, session: Session) -> Limits:
    shape = holdings.shape
    return Limits(shape.hidden_size, shape.num_experts, holdings.compute_dtype, session.reduced)


class _WaitedRequest:
    """A request whose outcome another thread waits for."""

    __slots__ = ("arrived", "call", "origin", "outcome")

    def __init__(self, call: ExecuteCall, session: Session) -> None:
        self.call = call
        self.origin = session.id
        self.arrived = arrival()
        self.outcome: Future[ExecuteResult | TitanError] = Future()

    def respond(self, outcome: ExecuteResult | TitanError, queue_us: int) -> None:
        if isinstance(outcome, ExecuteResult):
            outcome = outcome._replace(queue_us=queue_us)
        self.outcome.set_result(outcome)
