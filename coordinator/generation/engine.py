"""The generation engine: a bounded queue of requests and the one thread that owns MLX.

Everything MLX is made, used and dropped on that thread: the model is loaded there, requests run there one after
another, and the KV cache of a request dies there with it. A request that fails takes nothing with it: its client gets
an error, the model stays. The engine knows neither HTTP nor how a model is loaded or distributed.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from titan.common.errors import ContextTooLong, EngineFailed, EngineNotReady, QueueFull, TitanError
from titan.common.log import get_logger
from titan.coordinator.generation.events import Finished, Timings, Usage
from titan.coordinator.generation.handle import Handle, Job
from titan.coordinator.generation.model import LoadedModel, ServedModel
from titan.coordinator.generation.request import GenerationRequest
from titan.coordinator.generation.run import run_request
from titan.coordinator.generation.vocabulary import Vocabulary

__all__ = ["DEFAULT_QUEUE_LIMIT", "Engine", "EngineState", "EngineStatus"]

DEFAULT_QUEUE_LIMIT = 64
_STOP_AT_EXIT_S = 5.0
_RETRY_AFTER_BOUNDS_S = (1.0, 60.0)

EngineState = Literal["loading", "ready", "failed", "stopping"]

log = get_logger("coordinator.engine")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine is doing.

    Args:
        state: "loading", "ready", "failed" (loading did not work) or "stopping".
        phase: in words, what loading is at, or why it failed.
        running: requests on the model now (0 or 1).
        cancelling: of these, the ones that were told to end.
        queued: requests that wait.
        completed, failed, cancelled: requests that ended so, since the start.
    """

    state: EngineState
    phase: str
    running: int = 0
    cancelling: int = 0
    queued: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0


class Engine:
    """Runs requests on a model.

    Args:
        load: makes the model; called once, on the engine's thread.
        queue_limit: requests that may wait; more are refused.
    """

    def __init__(self, load: Callable[[], LoadedModel], *, queue_limit: int = DEFAULT_QUEUE_LIMIT) -> None:
        self._load = load
        self._queue_limit = queue_limit
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._stopping = False
        self._status = EngineStatus("loading", "not started")
        self._served: ServedModel | None = None
        self._typical_request_s = 1.0
        self._thread = threading.Thread(target=self._main, name="titan-engine", daemon=True)

    def start(self) -> None:
        """Begin to load the model. Once a life."""
        self.report_phase("starting")
        atexit.register(self.stop, _STOP_AT_EXIT_S)  # MLX aborts a process that ends around its running thread
        self._thread.start()

    def report_phase(self, phase: str) -> None:
        """For `load`, from any thread: say in a few words what it is at."""
        with self._changed:
            if self._status.state == "loading":
                self._status = replace(self._status, phase=phase)

    def status(self) -> EngineStatus:
        with self._changed:
            running = [] if self._running is None else [self._running]
            return replace(
                self._status,
                running=len(running),
                cancelling=sum(job.cancelled for job in running),
                queued=len(self._waiting),
            )

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
            return min(max(self._typical_request_s, low), high)

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
            if self._running is not None:
                self._running.mark_cancelled()
            self._changed.notify_all()
        for job in waiting:
            job.deliver(_stopping_error())
        if self._thread.ident is None:
            return True
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            return False
        atexit.unregister(self.stop)
        return True

    def _require_ready(self) -> ServedModel:
        status = self._status
        if status.state == "ready" and self._served is not None:
            return self._served
        if status.state == "failed":
            raise EngineNotReady(f"the model could not be loaded: {status.phase}", "see the coordinator's log")
        if status.state == "stopping":
            raise _stopping_error()
        raise EngineNotReady(f"the model is loading ({status.phase})", "ask /ready and try again when it is ready")

    def _cancel(self, job: Job) -> None:
        job.mark_cancelled()
        with self._changed:
            if job not in self._waiting:
                return  # it runs, and the loop looks at the mark, or it is over
            self._waiting.remove(job)
        self._finish_cancelled(job)

    def _finish_cancelled(self, job: Job) -> None:
        queue_s = time.monotonic() - job.submitted_s
        self._count("cancelled")
        job.deliver(Finished("cancelled", Usage(len(job.request.prompt), 0), Timings(queue_s)))

    def _count(self, outcome: Literal["completed", "failed", "cancelled"]) -> None:
        with self._changed:
            self._status = replace(self._status, **{outcome: getattr(self._status, outcome) + 1})

    def _main(self) -> None:
        loaded = self._load_model()
        if loaded is not None:
            try:
                while (job := self._next_job()) is not None:
                    self._answer(loaded, job)
            finally:
                loaded.close()
        del loaded
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()

    def _load_model(self) -> LoadedModel | None:
        self.report_phase("loading the model")
        try:
            maybe_set_recommended_wired_limit()  # on Metal: weights may stay resident; elsewhere nothing
            loaded = self._load()
            served = ServedModel(loaded.name, loaded.context_tokens, loaded.tokenizer, Vocabulary(loaded.tokenizer))
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

    def _next_job(self) -> Job | None:
        with self._changed:
            self._running = None
            while not self._waiting and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _answer(self, loaded: LoadedModel, job: Job) -> None:
        started_s = time.monotonic()
        try:
            finished = run_request(loaded, job, started_s)
        except Exception as error:
            log.error("a request failed", exc_info=True, request=job.request.request_id)
            traceback.clear_frames(error.__traceback__)  # they hold the request's KV cache
            cause = error.cause if isinstance(error, TitanError) else f"{type(error).__name__} in the model"
            outcome = EngineFailed(
                f"generation failed: {cause}", f"try again; the coordinator's log has it under {job.request.request_id}"
            )
            self._count("failed")
        else:
            outcome = finished
            self._count("cancelled" if finished.reason == "cancelled" else "completed")
        mx.clear_cache()
        with self._changed:
            self._running = None
            self._typical_request_s += 0.3 * (time.monotonic() - started_s - self._typical_request_s)
        job.deliver(outcome)


def _stopping_error() -> EngineNotReady:
    return EngineNotReady("the coordinator is stopping", "try again when it is back")
