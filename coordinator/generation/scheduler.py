"""What runs next on the model: one piece of a prompt, then one step of all that decodes. Knows no queue or thread.

Between two steps of running streams lies at most one piece of one prompt, so the longest pause of a stream is one
chunk and one step. Prompts are run first come, first served.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable

import mlx.core as mx

from titan.common.errors import TitanError
from titan.common.log import get_logger
from titan.coordinator.generation.batch import Batch
from titan.coordinator.generation.events import Finished
from titan.coordinator.generation.grammar import Grammars
from titan.coordinator.generation.handle import Job, wake
from titan.coordinator.generation.model import LoadedModel
from titan.coordinator.generation.observer import Observer
from titan.coordinator.generation.prefill import Prefill
from titan.coordinator.generation.processors import make_processors
from titan.coordinator.generation.prompt_cache import can_hold
from titan.coordinator.generation.request import GenerationRequest
from titan.coordinator.generation.running import Running

__all__ = ["Scheduler"]

OnEnd = Callable[[Job, Finished | TitanError], None]

log = get_logger("coordinator.engine")


class Scheduler:
    """Requests on the model, from admission to their end.

    Args:
        on_end: told of every admitted job once, with its last event.
        max_sequences: sequences that decode together at most.
    """

    def __init__(
        self, loaded: LoadedModel, grammars: Grammars, on_end: OnEnd, observer: Observer, max_sequences: int
    ) -> None:
        self._loaded = loaded
        self._grammars = grammars
        self._on_end = on_end
        self._observer = observer
        self._max_sequences = max_sequences
        self._reusable = loaded.prompt_cache is not None and can_hold(loaded.make_cache())
        self._batch: Batch[Running] = Batch(loaded.model)
        self._prefills: deque[tuple[Running, Prefill]] = deque()

    @property
    def idle(self) -> bool:
        return not self._batch.rows and not self._prefills

    @property
    def decoding(self) -> int:
        return len(self._batch)

    @property
    def prefilling(self) -> int:
        return len(self._prefills)

    @property
    def kv_tokens(self) -> int:
        """Places in KV memory that the admitted sequences may come to need: padded to the longest, as they lie."""
        wanted = self._wanted()
        return len(wanted) * max(wanted, default=0)

    def fits(self, request: GenerationRequest) -> bool:
        """Whether KV memory and the batch have room for a request now."""
        wanted = [*self._wanted(), len(request.prompt) + request.max_tokens]
        return len(wanted) <= self._max_sequences and len(wanted) * max(wanted) <= self._loaded.kv_budget_tokens

    def admit(self, job: Job) -> None:
        """Take a job in; it fits."""
        request = job.request
        try:
            running = Running(job, self._loaded.tokenizer, make_processors(request, self._grammars), self._observer)
            cache = self._loaded.make_cache()
            prefill = Prefill(
                self._loaded.model,
                request.prompt,
                cache,
                self._loaded.prefill_step_tokens,
                self._loaded.prompt_cache,
            )
        except TitanError as error:
            self._on_end(job, error)
        else:
            self._prefills.append((running, prefill))

    def turn(self) -> None:
        """Drop what was cancelled, do one piece of one prompt, step the batch."""
        self._drop_cancelled()
        self._prefill()
        if self._batch.rows:
            self._step()

    def settle(self) -> None:
        """Wait for the device, so that weights may be moved until the next turn."""
        self._batch.settle()

    def fail_all(self, error: Exception) -> None:
        """End every request with an error, and begin with an empty batch."""
        running = [*self._batch.rows, *(row for row, _ in self._prefills)]
        self._batch = Batch(self._loaded.model)
        self._prefills.clear()
        for row in running:
            self._fail(row, error)

    # ----------------------------------------------------------------------------------------------------------------

    def _wanted(self) -> list[int]:
        return [row.kv_tokens for row in self._batch.rows] + [row.kv_tokens for row, _ in self._prefills]

    def _drop_cancelled(self) -> None:
        if any(row.job.cancelled for row, _ in self._prefills):
            cancelled = [row for row, _ in self._prefills if row.job.cancelled]
            self._prefills = deque(pair for pair in self._prefills if not pair[0].job.cancelled)
            for row in cancelled:
                self._finish(row)
        rows = self._batch.rows
        if any(row.job.cancelled for row in rows):
            self._batch.keep([i for i, row in enumerate(rows) if not row.job.cancelled])
            for row in rows:
                if row.job.cancelled:
                    self._finish(row)

    def _prefill(self) -> None:
        if not self._prefills:
            return
        running, prefill = self._prefills[0]
        started = time.monotonic()
        try:
            if not prefill.complete:
                ran = prefill.advance(self._loaded.shared_step_tokens if self._batch.rows else None)
                if ran:
                    self._observer.prefilled(ran, time.monotonic() - started)
            running.job.prefilled_tokens = prefill.done_tokens
        except Exception as error:
            self._prefills.popleft()
            log.error("a request failed in its prompt", exc_info=True, request=running.job.request.request_id)
            traceback.clear_frames(error.__traceback__)  # they hold the request's KV cache
            self._fail(running, error)
            return
        if prefill.complete and not running.job.cancelled:
            if self._batch.under_way:
                self._step(joining=True)
            self._prefills.popleft()
            running.cached_tokens = prefill.cached_tokens
            self._batch.join(running, prefill.cache)

    def _step(self, *, joining: bool = False) -> None:
        batch = self._batch
        started = time.monotonic()
        rows = batch.rows

        def lookahead() -> bool:
            return self._loaded.lookahead() and not joining and not any(row.job.cancelled for row in rows)

        try:
            outcomes = batch.step(lookahead=lookahead)
        except Exception as error:
            log.error("a step failed", exc_info=True, requests=[row.job.request.request_id for row in rows])
            traceback.clear_frames(error.__traceback__)
            if len(rows) == 1 or not batch.rewind():
                batch.keep([])
                for row in rows:
                    self._fail(row, error)
                return
            outcomes = batch.step_apart()
        now = time.monotonic()
        self._observer.stepped(len(rows), now - started)
        ended: list[Running] = []
        for row, outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, Exception):
                traceback.clear_frames(outcome.__traceback__)
                self._fail(row, outcome)
            elif row.take(outcome, now):
                ended.append(row)
        asleep = [row for row in rows if row.asleep]
        if asleep:
            wake(row.job for row in asleep)
            for row in asleep:
                row.asleep = False
        if ended:
            for row in ended:
                self._remember(row)
            batch.keep([i for i, row in enumerate(batch.rows) if row not in ended])
            for row in ended:
                self._finish(row)

    def _remember(self, row: Running) -> None:
        """Keep what an answer left in the KV cache: the next turn of the conversation begins with it."""
        prompt_cache = self._loaded.prompt_cache
        index = self._batch.rows.index(row)
        if prompt_cache is None or not self._reusable:
            return
        prompt = row.job.request.prompt

        def keys_and_values(start: int, end: int) -> list[tuple[mx.array, mx.array]]:
            return self._batch.keys_and_values(index, start, end)

        prompt_cache.insert([*prompt, *row.tokens[:-1]], keys_and_values)

    def _finish(self, row: Running) -> None:
        finished = row.finished()
        self._observer.finished(
            "cancelled" if finished.reason == "cancelled" else "completed", finished.usage, finished.timings
        )
        self._on_end(row.job, finished)
        if self.idle:
            mx.clear_cache()

    def _fail(self, row: Running, error: Exception) -> None:
        self._observer.finished("failed", row.usage(), row.timings())
        self._on_end(row.job, row.failed(error))
        mx.clear_cache()
