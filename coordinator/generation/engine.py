"""The generation engine: what others see of the queue of requests and of the one thread that owns MLX.

Behind it: `jobs.py` holds the requests, `life.py` says whether they are taken, `supervisor.py` is the thread,
`loop.py` and `scheduler.py` are what it does, `watchdog.py` looks at it from outside. A request that fails takes
nothing with it: its client gets an error, the model stays. Knows neither HTTP nor how a model is distributed.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import TypeVar

from titan.common.errors import ContextTooLong, EngineFailed
from titan.common.log import get_logger
from titan.coordinator.defaults import DEFAULT_MAX_SEQUENCES
from titan.coordinator.generation.handle import Handle, Job
from titan.coordinator.generation.jobs import Jobs
from titan.coordinator.generation.life import Life, stopping_error
from titan.coordinator.generation.model import LoadedModel, ServedModel
from titan.coordinator.generation.observer import Observer, Unobserved
from titan.coordinator.generation.request import GenerationRequest
from titan.coordinator.generation.status import EngineStatus
from titan.coordinator.generation.supervisor import Supervisor
from titan.coordinator.generation.watchdog import Watchdog
from titan.coordinator.generation.work import Work

__all__ = ["DEFAULT_MAX_SEQUENCES", "DEFAULT_QUEUE_LIMIT", "Engine"]

DEFAULT_QUEUE_LIMIT = 64
DEFAULT_STUCK_AFTER_S = 300.0
_STOP_AT_EXIT_S = 5.0

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
        observer = observer or Unobserved()
        self._max_sequences = max_sequences
        self._jobs = Jobs(queue_limit, observer)
        self._work = Work()
        self._watchdog = Watchdog(stuck_after_s, self._on_stuck)
        self._life = Life(self._watchdog)
        self._supervisor = Supervisor(load, self._jobs, self._work, self._life, self._watchdog, observer, max_sequences)
        self._thread = threading.Thread(target=self._supervisor.run, name="titan-engine", daemon=True)

    def start(self) -> None:
        """Begin to load the model. Once a life."""
        self.report_phase("starting")
        atexit.register(self.stop, _STOP_AT_EXIT_S)  # MLX aborts a process that ends around its running thread
        self._watchdog.start()
        self._thread.start()

    def report_phase(self, phase: str) -> None:
        """For `load`, from any thread: say in a few words what it is at."""
        self._life.loading(phase)

    def status(self) -> EngineStatus:
        state, phase = self._life.now()
        counts, occupancy = asdict(self._jobs.counts()), asdict(self._supervisor.occupancy)
        return EngineStatus(state, phase, restarts=self._supervisor.restarts, **counts, **occupancy)

    def served(self) -> ServedModel:
        """Name, context and tokenizer of the model.

        Raises:
            EngineNotReady: it is still loading, failed to load, is stuck, or the engine is draining or stopping.
        """
        return self._life.served()

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
        context_tokens = self._life.served().context_tokens
        for request in requests:
            if len(request.prompt) + request.max_tokens > context_tokens:
                raise ContextTooLong(
                    f"prompt ({len(request.prompt)} tokens) and answer ({request.max_tokens}) exceed the model's "
                    f"context of {context_tokens} tokens",
                    "shorten the prompt or lower max_tokens",
                )
        loop, now = asyncio.get_running_loop(), time.monotonic()
        jobs = [Job(request, loop, now) for request in requests]
        self._jobs.put(jobs)
        return [Handle(job, self._jobs.cancel) for job in jobs]

    def retry_after_s(self) -> float:
        """A guess of when the queue will have moved."""
        return self._jobs.retry_after_s(self._max_sequences)

    def run_between_steps(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the engine's thread between two steps, or at once when it is idle.

        No forward pass is under way then and nothing unevaluated reads the model's weights; requests that run wait.
        The future fails with EngineNotReady when the engine stops first.
        """
        with self._jobs.changed:
            future = self._work.put(work)
            if self._thread.ident is not None and not self._thread.is_alive():
                self._work.refuse(stopping_error())
            self._jobs.changed.notify_all()
        return future

    def drain(self) -> None:
        """Take no new requests, finish those that are here. `resume` takes it back."""
        self._life.switch("ready", "draining", "draining: finishing what runs")

    def resume(self) -> None:
        self._life.switch("draining", "ready", "ready")

    def stop(self, deadline_s: float) -> bool:
        """Refuse new requests, end what waits with an error, cancel what runs, close the model, end the thread.

        Returns:
            whether the thread ended within the deadline.
        """
        self._life.stop()
        self._jobs.refuse(stopping_error())
        if self._thread.ident is None:
            self._work.refuse(stopping_error())
            return True
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            return False
        self._watchdog.stop()
        atexit.unregister(self.stop)
        return True

    def _on_stuck(self, seconds: float) -> None:
        """On the watchdog's thread: clients of a step that does not end get an error instead of silence."""
        error = EngineFailed(self._life.stuck_phase(seconds), "try again; the coordinator's log has more")
        requests = self._jobs.abandon_running(error)
        log.error("the engine is stuck", seconds=round(seconds, 1), requests=requests)
