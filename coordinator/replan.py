"""Planning again while serving: when what the plan was made from has drifted, and when the gain is worth the move.

Looks at the cluster every `PERIOD_S`: workers that came or went for long, replies that take much longer or shorter than
planned. Experts then move layer by layer between two steps; requests go on, and whatever is on its way is executed
from where it still is. Knows the cluster's surface, not its sessions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Protocol, TypeVar

from titan.common.errors import PlanError, TitanError
from titan.common.log import get_logger
from titan.common.units import format_seconds
from titan.coordinator.cluster import Cluster
from titan.coordinator.moving import begin_move, finish_move, move_layer
from titan.coordinator.planning import expected_step_s
from titan.placement import Plan
from titan.placement.figures import Figures, WorkerFigures

log = get_logger("coordinator.replan")

T = TypeVar("T")

PERIOD_S = 30.0
DRIFT = 1.5  # a worker's replies take so many times longer, or shorter, than planned
LOOKS = 3  # ... in so many looks one after another, before anything is done about it
GAIN = 0.10  # a new plan must promise at least this much, or nothing moves
STEP_TIMEOUT_S = 120.0


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

    def replan(self, figures: Figures | None = None, *, force: bool = False) -> Plan | None:
        """Solve again and move the experts if that promises at least GAIN; returns the plan that was installed.

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
            problem = cluster.problem(figures or cluster.figures)
            plan = cluster.solve(problem)
            running = cluster.plan
            if running is not None and not force:
                now_s, then_s = expected_step_s(problem, running), expected_step_s(problem, plan)
                if then_s > (1 - GAIN) * now_s:
                    log.info("the running plan stays", step=format_seconds(now_s), best=format_seconds(then_s))
                    return None
            self._move(plan)
            return plan

    def on_request(self) -> dict[str, object]:
        """For an operator who asks: what `replan` did, as JSON values. Raises what `replan` raises."""
        plan = self.replan()
        running = plan or self._cluster.plan
        step_s = running.predicted.step_s if running is not None and running.predicted is not None else None
        return {"moved": plan is not None, "predicted_step_s": step_s}

    def _move(self, plan: Plan) -> None:
        cluster = self._cluster
        changed = begin_move(cluster, plan)
        for done, position in enumerate(changed):
            if self._stop.is_set():
                return
            self._on_engine(lambda position=position: move_layer(cluster, plan, position))
            log.debug("layer moved", layer=plan.layers[position], done=done + 1, of=len(changed))
        self._on_engine(lambda: finish_move(cluster, plan))

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
        ratios = drifted(figures, cluster.reply_medians())
        self._looks = {name: self._looks.get(name, 0) + 1 for name in ratios}
        lasting = {name: ratio for name, ratio in ratios.items() if self._looks[name] >= LOOKS}
        present = self._present()
        came = {name for name in present - self._known if name in figures.workers}
        if not lasting and not came:
            return
        why = [f"{name} answers in {ratio:.1f} × its planned time" for name, ratio in lasting.items()]
        why += [f"{name} is there now" for name in sorted(came)]
        log.info(f"planning again: {', '.join(why)}")
        self._looks.clear()
        self._known = present
        cluster.figures = corrected(figures, lasting)
        self.replan()

    def _present(self) -> frozenset[str]:
        return frozenset(name for name, size in self._cluster.worker_memory().items() if size)
