"""The generation engine: a bounded queue of requests and the one thread that owns MLX.

Everything MLX is made, used and dropped on that thread: the model is loaded there, requests run there together
(`scheduler.py`), and the KV cache of a request dies there with it. A request that fails takes nothing with it: its
client gets an error, the model stays; so it does when the loop itself fails and begins anew. The engine knows neither
HTTP nor how a model is loaded or distributed.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal, TypeVar

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from titan.common.errors import ContextTooLong, EngineFailed, EngineNotReady, QueueFull, TitanError
from titan.common.log import get_logger
from titan.coordinator.generation.events import Finished, Timings, Usage
from titan.coordinator.generation.grammar import Grammars
from titan.coordinator.generation.handle import Handle, Job
from titan.coordinator.generation.model import LoadedModel, ServedModel
from titan.coordinator.generation.observer import Observer, Unobserved
from titan.coordinator.generation.request import GenerationRequest
from titan.coordinator.generation.scheduler import Scheduler
from titan.coordinator.generation.status import EngineState, EngineStatus
from titan.coordinator.generation.vocabulary import Vocabulary
from titan.coordinator.generation.watchdog import Watchdog
from titan.coordinator.generation.work import Work

__all__ = ["DEFAULT_MAX_SEQUENCES", "DEFAULT_QUEUE_LIMIT", "Engine"]

DEFAULT_QUEUE_LIMIT = 64
DEFAULT_MAX_SEQUENCES = 8
DEFAULT_STUCK_AFTER_S = 300.0
MAX_RESTARTS_A_MINUTE = 5
_STOP_AT_EXIT_S = 5.0
_RETRY_AFTER_BOUNDS_S = (1.0, 60.0)


T = TypeVar("T")

log = get_logger("coordinator.engine")


class Engine:
    """Runs requests on a model, several at a time.

    Args:
        load: makes the model; called once, on the engine's thread.
        queue_limit: requests that may wait; more are refused.
        max_sequences: requests that run together at most; KV memory may allow fewer.
        stuck_after_s: a step that takes longer is taken for stuck: its clients get an error.
        observer: told how steps and requests went.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        *,
        queue_limit: int = DEFAULT_QUEUE_LIMIT,
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        stuck_after_s: float = DEFAULT_STUCK_AFTER_S,
        observer: Observer | None = None,
    ) -> None:
        self._load = load
        self._queue_limit = queue_limit
        self._max_sequences = max_sequences
        self._observer = observer or Unobserved()
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._work = Work()
        self._stopping = False
        self._status = EngineStatus("loading", "not started")
        self._served: ServedModel | None = None
        self._typical_request_s = 1.0
        self._restarts_s: deque[float] = deque(maxlen=MAX_RESTARTS_A_MINUTE)
        self._watchdog = Watchdog(stuck_after_s, self._on_stuck)
        self._thread = threading.Thread(target=self._main, name="titan-engine", daemon=True)

    def start(self) -> None:
        """Begin to load the model. Once a life."""
        self.report_phase("starting")
        atexit.register(self.stop, _STOP_AT_EXIT_S)  # MLX aborts a process that ends around its running thread
        self._watchdog.start()
        self._thread.start()

    def report_phase(self, phase: str) -> None:
        """For `load`, from any thread: say in a few words what it is at."""
        with self._changed:
            if self._status.state == "loading":
                self._status = replace(self._status, phase=phase)

    def status(self) -> EngineStatus:
        with self._changed:
            status = replace(
                self._status,
                running=len(self._running),
                cancelling=sum(job.cancelled for job in self._running),
                queued=len(self._waiting),
            )
        stuck_s = self._watchdog.stuck_s
        if status.state in ("ready", "draining") and stuck_s > 0:
            return replace(status, state="stuck", phase=self._stuck_phase(stuck_s + self._watchdog.limit_s))
        return status

    def served(self) -> ServedModel:
        """Name, context and tokenizer of the model.

        Raises:
            EngineNotReady: it is still loading, failed to load, or the engine is stopping.
        """
        with self._changed:
            return self._require_ready()

    def submit(self, request: GenerationRequest) -> Handle:
        """Queue a request, from the asyncio loop that will read its events.

        Raises:
            EngineNotReady: the model is not there.
            QueueFull: too many requests wait already; `retry_after_s` says when to come back.
            ContextTooLong: prompt and answer do not fit the context.
        """
        return self.submit_all([request])[0]

    def submit_all(self, requests: list[GenerationRequest]) -> list[Handle]:
        """Queue several requests, all of them or none; raises what `submit` raises."""
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        jobs = [Job(request, loop, now) for request in requests]
        with self._changed:
            context_tokens = self._require_ready().context_tokens
            for request in requests:
                if len(request.prompt) + request.max_tokens > context_tokens:
                    raise ContextTooLong(
                        f"prompt ({len(request.prompt)} tokens) and answer ({request.max_tokens}) exceed the model's "
                        f"context of {context_tokens} tokens",
                        "shorten the prompt or lower max_tokens",
                    )
            if len(self._waiting) + len(jobs) > self._queue_limit:
                raise QueueFull(
                    f"{len(self._waiting)} requests wait already and the queue holds {self._queue_limit}",
                    "try again later",
                )
            self._waiting.extend(jobs)
            self._changed.notify_all()
        return [Handle(job, self._cancel) for job in jobs]

    def retry_after_s(self) -> float:
        """A guess of when the queue will have moved."""
        low, high = _RETRY_AFTER_BOUNDS_S
        with self._changed:
            rounds = 1 + len(self._waiting) / self._max_sequences
            return min(max(self._typical_request_s * rounds / 2, low), high)

    def run_between_steps(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the engine's thread between two steps, or at once when it is idle.

        No forward pass is under way then and nothing unevaluated reads the model's weights; requests that run wait.
        The future fails with EngineNotReady when the engine stops first.
        """
        with self._changed:
            future = self._work.put(work)
            if self._thread.ident is not None and not self._thread.is_alive():
                self._work.refuse(_stopping_error())
            self._changed.notify_all()
        return future

    def drain(self) -> None:
        """Take no new requests, finish those that are here. `resume` takes it back."""
        self._switch("ready", "draining", "draining: finishing what runs")

    def resume(self) -> None:
        self._switch("draining", "ready", "ready")

    def stop(self, deadline_s: float) -> bool:
        """Refuse new requests, end what waits with an error, cancel what runs, close the model, end the thread.

        Returns:
            whether the thread ended within the deadline.
        """
        with self._changed:
            self._stopping = True
            if self._status.state != "failed":
                self._status = replace(self._status, state="stopping", phase="stopping")
            waiting = list(self._waiting)
            self._waiting.clear()
            for job in self._running:
                job.mark_cancelled()
            self._changed.notify_all()
        for job in waiting:
            job.deliver(_stopping_error())
        if self._thread.ident is None:
            self._work.refuse(_stopping_error())
            return True
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            return False
        self._watchdog.stop()
        atexit.unregister(self.stop)
        return True

    def _require_ready(self) -> ServedModel:
        status = self._status
        stuck_s = self._watchdog.stuck_s
        if status.state == "ready" and self._served is not None and not stuck_s:
            return self._served
        if status.state == "failed":
            raise EngineNotReady(f"the model cannot be used: {status.phase}", "see the coordinator's log")
        if status.state == "stopping":
            raise _stopping_error()
        if status.state == "draining":
            raise EngineNotReady("the coordinator is draining and takes no new requests", "try again later")
        if stuck_s:
            raise EngineNotReady(self._stuck_phase(stuck_s + self._watchdog.limit_s), "see the coordinator's log")
        raise EngineNotReady(f"the model is loading ({status.phase})", "ask /ready and try again when it is ready")

    def _switch(self, before: EngineState, after: EngineState, phase: str) -> None:
        with self._changed:
            if self._status.state == before:
                self._status = replace(self._status, state=after, phase=phase)
                log.info("the engine changed state", before=before, after=after)

    def _stuck_phase(self, seconds: float) -> str:
        return f"one step of the model has been running for {seconds:.0f} s"

    def _on_stuck(self, seconds: float) -> None:
        """On the watchdog's thread: clients of a step that does not end get an error instead of silence."""
        with self._changed:
            jobs = list(self._running)
        log.error("the engine is stuck", seconds=round(seconds, 1), requests=[j.request.request_id for j in jobs])
        for job in jobs:
            job.mark_cancelled()
            job.deliver(EngineFailed(self._stuck_phase(seconds), "try again; the coordinator's log has more"))

    def _cancel(self, job: Job) -> None:
        job.mark_cancelled()
        with self._changed:
            if job not in self._waiting:
                return  # it runs, and the loop looks at the mark, or it is over
            self._waiting.remove(job)
        self._finish_cancelled(job)

    def _finish_cancelled(self, job: Job) -> None:
        finished = Finished(
            "cancelled", Usage(len(job.request.prompt), 0), Timings(queue_s=time.monotonic() - job.submitted_s)
        )
        self._observer.finished("cancelled", finished.usage, finished.timings)
        self._count("cancelled")
        job.deliver(finished)

    def _count(self, outcome: Literal["completed", "failed", "cancelled"]) -> None:
        with self._changed:
            self._status = replace(self._status, **{outcome: getattr(self._status, outcome) + 1})

    def _main(self) -> None:
        loaded = self._load_model()
        if loaded is not None:
            try:
                while not self._serve(loaded):
                    pass
            finally:
                if loaded.prompt_cache is not None:
                    loaded.prompt_cache.close()
                loaded.close()
        del loaded
        self._work.refuse(_stopping_error())
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()

    def _serve(self, loaded: LoadedModel) -> bool:
        """Serve until the engine is stopped: True. False when the loop failed and is to begin anew."""
        grammars = self._served.grammars if self._served is not None else Grammars(loaded.tokenizer)
        scheduler = Scheduler(loaded, grammars, self._on_end, self._observer, self._max_sequences)
        self._show(scheduler, loaded)
        try:
            while self._wait_for_something(scheduler):
                self._watchdog.begin()
                if self._work.waiting:
                    scheduler.settle()
                    self._work.run()
                while (job := self._admissible(scheduler)) is not None:
                    scheduler.admit(job)
                scheduler.turn()
                self._show(scheduler, loaded)
                self._watchdog.end()
        except Exception as error:
            log.error("the engine's loop failed and begins anew", exc_info=True)
            traceback.clear_frames(error.__traceback__)
            scheduler.fail_all(error)
            self._end_lost(error)
            return self._give_up()
        finally:
            self._watchdog.end()
        return True

    def _wait_for_something(self, scheduler: Scheduler) -> bool:
        """False when the engine is to end."""
        if not scheduler.idle:
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting or self._work.waiting)
            return not self._stopping

    def _admissible(self, scheduler: Scheduler) -> Job | None:
        """The next request in line, if there is room for it."""
        with self._changed:
            if self._stopping or not self._waiting or not scheduler.fits(self._waiting[0].request):
                return None
            job = self._waiting.popleft()
            self._running.append(job)
            return job

    def _on_end(self, job: Job, outcome: Finished | TitanError) -> None:
        with self._changed:
            if job not in self._running:
                return
            self._running.remove(job)
            self._typical_request_s += 0.3 * (time.monotonic() - job.submitted_s - self._typical_request_s)
        if isinstance(outcome, Finished):
            self._count("cancelled" if outcome.reason == "cancelled" else "completed")
        else:
            self._count("failed")
        job.deliver(outcome)

    def _end_lost(self, error: Exception) -> None:
        """Fail what was admitted and is in no scheduler."""
        with self._changed:
            jobs = list(self._running)
        for job in jobs:
            self._on_end(job, EngineFailed(f"the engine failed ({type(error).__name__})", "try again"))

    def _give_up(self) -> bool:
        now = time.monotonic()
        full = len(self._restarts_s) == MAX_RESTARTS_A_MINUTE
        with self._changed:
            self._status = replace(self._status, restarts=self._status.restarts + 1)
            if not full or now - self._restarts_s[0] > 60:
                self._restarts_s.append(now)
                return False
            self._status = replace(self._status, state="failed", phase="the engine failed again and again")
            waiting = list(self._waiting)
            self._waiting.clear()
        for job in waiting:
            job.deliver(EngineFailed("the engine failed again and again", "see the coordinator's log"))
        return True

    def _show(self, scheduler: Scheduler, loaded: LoadedModel) -> None:
        figures = (scheduler.decoding, scheduler.prefilling, scheduler.kv_tokens, loaded.kv_budget_tokens)
        status = self._status
        if figures != (status.decoding, status.prefilling, status.kv_tokens, status.kv_budget_tokens):
            with self._changed:
                self._status = replace(
                    self._status,
                    decoding=figures[0],
                    prefilling=figures[1],
                    kv_tokens=figures[2],
                    kv_budget_tokens=figures[3],
                )

    def _load_model(self) -> LoadedModel | None:
        self.report_phase("loading the model")
        try:
            maybe_set_recommended_wired_limit()  # on Metal: weights may stay resident; elsewhere nothing
            loaded = self._load()
            tokenizer = loaded.tokenizer
            served = ServedModel(
                loaded.name, loaded.context_tokens, tokenizer, Vocabulary(tokenizer), Grammars(tokenizer)
            )
        except Exception as error:
            log.error("the model could not be loaded", exc_info=True)
            traceback.clear_frames(error.__traceback__)
            reason = str(error) if isinstance(error, TitanError) else f"{type(error).__name__}: {error}"
            with self._changed:
                self._status = replace(self._status, state="failed", phase=reason)
            return None
        with self._changed:
            self._served = served
            if not self._stopping:
                self._status = replace(self._status, state="ready", phase="ready")
        return loaded


def _stopping_error() -> EngineNotReady:
    return EngineNotReady("the coordinator is stopping", "try again when it is back")
