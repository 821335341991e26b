"""Planning again while serving: when what the plan was made from has drifted, and when the gain is worth the move.

Looks at the cluster every `PERIOD_S`: workers that came, replies that take much longer or shorter than planned, workers
reached at another address, routing that is not what was planned for. Experts then move layer by layer between two
steps; requests go on, and whatever is on its way is executed from where it still is. Knows the cluster's surface, not
its sessions.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from titan.common.errors import PlanError, TitanError
from titan.common.log import get_logger
from titan.common.units import format_seconds
from titan.coordinator.cluster import Cluster
from titan.coordinator.moving import begin_move, finish_move, move_layer
from titan.coordinator.planning import expected_step_s
from titan.placement import Plan
from titan.placement.drift import Frequencies, RoutingDrift
from titan.placement.figures import Figures, WorkerFigures

log = get_logger("coordinator.replan")

T = TypeVar("T")

PERIOD_S = 30.0
DRIFT = 1.5  # a worker's replies take so many times longer, or shorter, than planned
LOOKS = 3  # ... in so many looks one after another, before anything is done about it
GAIN = 0.10  # a new plan must promise at least this much, or nothing moves
STEP_TIMEOUT_S = 120.0
KEPT = 32  # times of planning again that are remembered


class BetweenSteps(Protocol):
    """`Engine.run_between_steps`."""

    def __call__(self, work: Callable[[], T]) -> Future[T]: ...


def drifted(figures: Figures, replies: dict[str, tuple[int, float]]) -> dict[str, float]:
    """Worker -> measured ÷ planned seconds of its typical call, where that is beyond DRIFT.

    Args:
        replies: worker -> (pairs, median seconds) of the calls it was sent lately.
    """
    found = {}
    for name, (pairs, seconds) in replies.items():
        worker = figures.workers.get(name)
        if worker is None:
            continue
        planned = worker.round_trip_s + pairs * worker.compute_s
        ratio = seconds / planned if planned > 0 else 1.0
        if not 1 / DRIFT <= ratio <= DRIFT:
            found[name] = ratio
    return found


def corrected(figures: Figures, ratios: dict[str, float]) -> Figures:
    """Figures in which the drifted workers cost what their replies say."""
    workers: dict[str, WorkerFigures] = dict(figures.workers)
    for name, ratio in ratios.items():
        old = workers[name]
        workers[name] = replace(old, round_trip_s=old.round_trip_s * ratio, compute_s=old.compute_s * ratio)
    return replace(figures, workers=workers)


def readdressed(figures: Figures, plan: Plan | None, addresses: dict[str, str]) -> dict[str, str]:
    """Worker -> where it is reached now, for those planned at another address whose figures here are known."""
    planned = {} if plan is None else {node.name: node.address for node in plan.nodes}
    return {
        name: address
        for name, address in addresses.items()
        if address and planned.get(name) and planned[name] != address and figures.at(name, address) is not None
    }


def reached_at(figures: Figures, addresses: dict[str, str]) -> Figures:
    """Figures whose workers are used at these addresses, where they were measured."""
    workers, elsewhere = dict(figures.workers), dict(figures.elsewhere)
    for name, address in addresses.items():
        here = figures.at(name, address)
        if here is not None:
            others = (*([workers[name]] if name in workers else []), *elsewhere.get(name, ()))
            workers[name], elsewhere[name] = here, tuple(f for f in others if f is not here)
    return replace(figures, workers=workers, elsewhere=elsewhere)


@dataclass(frozen=True, slots=True)
class Replanned:
    """One time of planning again: why, whether experts moved, and the step before and after, as expected then."""

    why: str
    moved: bool
    step_s: float
    best_s: float


class Replanner:
    """A background thread that keeps the plan fit.

    Args:
        cluster: loaded, with a plan made from figures.
        between_steps: runs work on the engine's thread between two steps.
    """

    def __init__(self, cluster: Cluster, between_steps: BetweenSteps, *, period_s: float = PERIOD_S) -> None:
        self._cluster = cluster
        self._between_steps = between_steps
        self._period_s = period_s
        self._stop = threading.Event()
        self._moving = threading.Lock()
        self._looks: dict[str, int] = {}
        self._routing: RoutingDrift | None = None
        self.done: deque[Replanned] = deque(maxlen=KEPT)
        self._known = frozenset[str]()
        self._thread = threading.Thread(target=self._watch, name="titan-replan", daemon=True)

    def start(self) -> None:
        self._known = self._present()
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop watching; a move that is under way ends with the layer it is at."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def replan(
        self,
        figures: Figures | None = None,
        *,
        force: bool = False,
        frequencies: Frequencies | None = None,
        why: str = "asked for",
    ) -> Plan | None:
        """Solve again and move the experts if that promises at least GAIN; returns the plan that was installed.

        Args:
            frequencies: of routing, [moe layer][expert]; None: those of the running plan.

        An error leaves the running plan as it is, but for layers that were moved already: those are as good as before.

        Raises:
            TitanError: the cluster was not planned from figures, or solving failed.
        """
        cluster = self._cluster
        if figures is None and cluster.figures is None:
            raise PlanError(
                "this cluster was not planned from measured figures",
                "start the coordinator without --quick-plan and --plan",
            )
        with self._moving:
            problem = cluster.planner.problem(
                figures or cluster.figures, frequencies or cluster.frequencies, cluster.reuse
            )
            plan = cluster.planner.solve(problem)
            running = cluster.plan
            then_s = expected_step_s(problem, plan)
            now_s = expected_step_s(problem, running) if running is not None else then_s
            worth = running is None or force or then_s <= (1 - GAIN) * now_s
            if worth:
                self._move(plan)
            else:
                log.info("the running plan stays", step=format_seconds(now_s), best=format_seconds(then_s))
            cluster.frequencies = frequencies or cluster.frequencies
            self.done.append(Replanned(why, worth, now_s, then_s))
            return plan if worth else None

    def on_request(self) -> dict[str, object]:
        """For an operator who asks: what `replan` did, as JSON values. Raises what `replan` raises."""
        plan = self.replan()
        running = plan or self._cluster.plan
        step_s = running.predicted.step_s if running is not None and running.predicted is not None else None
        return {"moved": plan is not None, "predicted_step_s": step_s}

    def _move(self, plan: Plan) -> None:
        cluster, running = self._cluster, self._cluster.plan
        try:
            changed = begin_move(cluster, plan)
            for done, position in enumerate(changed):
                if self._stop.is_set():
                    raise PlanError("the move was interrupted", "the running plan stays")
                self._on_engine(lambda position=position: move_layer(cluster, plan, position))
                log.debug("layer moved", layer=plan.layers[position], done=done + 1, of=len(changed))
            self._on_engine(lambda: finish_move(cluster, plan))
        except BaseException:
            if running is not None and cluster.plan is running:
                cluster.workers.assign(running)  # they hold again what dispatch takes them to hold
            raise

    def _on_engine(self, work: Callable[[], None]) -> None:
        future = self._between_steps(work)
        try:
            future.result(STEP_TIMEOUT_S)
        except FutureTimeout:
            future.cancel()  # or a layer would move long after this plan was given up
            raise

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._look()
            except (TitanError, FutureTimeout, RuntimeError, ValueError, MemoryError) as error:
                log.warning(f"planning again failed, the running plan stays: {error}")

    def _look(self) -> None:
        cluster = self._cluster
        figures = cluster.figures
        if figures is None:
            return
        routing = self._look_at_routing()
        ratios = drifted(figures, cluster.workers.reply_medians())
        moved = readdressed(figures, cluster.plan, {s.name: s.address for s in cluster.workers.status()})
        seen = [*ratios, *(f"{name} at" for name in moved), *(["routing"] if routing.drifted else [])]
        self._looks = {what: self._looks.get(what, 0) + 1 for what in seen}
        lasting = {n: ratio for n, ratio in ratios.items() if self._looks[n] >= LOOKS and n not in moved}
        elsewhere = {name: address for name, address in moved.items() if self._looks[f"{name} at"] >= LOOKS}
        routed = self._looks.get("routing", 0) >= LOOKS
        present = self._present()
        came = {name for name in present - self._known if name in figures.workers}
        if not (lasting or came or elsewhere or routed):
            return
        why = [f"{name} answers in {ratio:.1f} × its planned time" for name, ratio in lasting.items()]
        why += [f"{name} is there now" for name in sorted(came)]
        why += [f"{name} is reached at {address} now" for name, address in elsewhere.items()]
        if routed:
            why.append(f"{routing.drift():.0%} of the choices go to other experts than planned")
        words = ", ".join(why)
        log.info(f"planning again: {words}")
        self._looks.clear()
        self._known = present
        cluster.figures = corrected(reached_at(figures, elsewhere), lasting)
        frequencies = routing.seen() if routed else None
        self.replan(frequencies=frequencies, why=words)
        if frequencies is not None:
            routing.planned_for(frequencies)

    def _look_at_routing(self) -> RoutingDrift:
        shape, dispatcher = self._cluster.checkpoint.shape, self._cluster.dispatcher
        if self._routing is None:
            self._routing = RoutingDrift(len(shape.layers), shape.num_experts, shape.top_k, self._cluster.frequencies)
        if dispatcher is not None and dispatcher.routing is not None:
            self._routing.look(*dispatcher.routing.total())
        return self._routing

    def _present(self) -> frozenset[str]:
        return frozenset(name for name, size in self._cluster.workers.memory().items() if size)
