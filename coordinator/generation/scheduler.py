"""What runs next on the model: one piece of a prompt, then one step of all that decodes. Knows no queue or thread.

Between two steps of running streams lies at most one piece of one prompt, so the longest pause of a stream is one
chunk and one step. Prompts are run first come, first served.

A request is admitted when KV memory has room for all as they are and AHEAD_TOKENS further. Should it run short after
all, the sequence that came last is set back: its KV is dropped, and it goes on, with all that it may need set aside,
once there is room. So nothing is set back twice, and the one that came first never.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
from titan.coordinator.generation.room import Need, peak_places
from titan.coordinator.generation.running import Running

__all__ = ["Occupancy", "Scheduler"]

AHEAD_TOKENS = 256
_NEXT_STEPS = 2  # the one that may be under way, and the one after it

OnEnd = Callable[[Job, Finished | TitanError], None]

log = get_logger("coordinator.engine")


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Sequences in the batch, with prompts to run, and set back; places of KV memory that they use, and its size."""

    decoding: int = 0
    prefilling: int = 0
    set_back: int = 0
    kv_tokens: int = 0
    kv_budget_tokens: int = 0


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
        self._set_back: deque[Running] = deque()  # the one that came first goes on first

    @property
    def idle(self) -> bool:
        return not self._batch.rows and not self._prefills and not self._set_back

    @property
    def occupancy(self) -> Occupancy:
        places = peak_places(self._needs(_NEXT_STEPS))
        counts = len(self._batch), len(self._prefills), len(self._set_back)
        return Occupancy(*counts, places, self._loaded.kv_budget_tokens)

    def fits(self, request: GenerationRequest) -> bool:
        """Whether KV memory and the batch have room for a request now."""
        prompt = len(request.prompt)
        return (
            not self._set_back
            and len(self._batch) + len(self._prefills) < self._max_sequences
            and self._has_room(AHEAD_TOKENS, Need(prompt, prompt + request.max_tokens, False).within(AHEAD_TOKENS))
        )

    def admit(self, job: Job) -> None:
        """Take a job in; it fits."""
        try:
            processors = make_processors(job.request, self._grammars)
            self._begin(Running(job, self._loaded.tokenizer, processors, self._observer))
        except TitanError as error:
            self._on_end(job, error)

    def turn(self) -> None:
        """Drop what was cancelled, see that there is room, do one piece of one prompt, step the batch."""
        self._drop_cancelled()
        if not self._has_room(_NEXT_STEPS):
            self._make_room()
        elif self._set_back:
            self._go_on()
        self._prefill()
        if self._batch.rows:
            self._step()

    def settle(self) -> None:
        """Wait for the device, so that weights may be moved until the next turn."""
        self._batch.settle()

    def fail_all(self, error: Exception) -> None:
        """End every request with an error, and begin with an empty batch."""
        running = [*self._batch.rows, *(row for row, _ in self._prefills), *self._set_back]
        self._batch = Batch(self._loaded.model)
        self._prefills.clear()
        self._set_back.clear()
        for row in running:
            self._fail(row, error)

    # room in KV memory ----------------------------------------------------------------------------------------------

    def _needs(self, steps: int) -> Iterator[Need]:
        """What is in KV memory, looking so many steps ahead; all the way for what has been reserved."""
        for rows, decoding in ((self._batch.rows, True), ([row for row, _ in self._prefills], False)):
            for row in rows:
                need = row.need(decoding=decoding)
                yield need if row.reserved else need.within(steps)

    def _has_room(self, steps: int, *more: Need) -> bool:
        return peak_places([*self._needs(steps), *more]) <= self._loaded.kv_budget_tokens

    def _make_room(self) -> None:
        if self._batch.under_way:
            self._step(joining=True)
        while not self._has_room(_NEXT_STEPS):
            rows = [*self._batch.rows, *(row for row, _ in self._prefills)]
            last = max((row for row in rows if not row.reserved), key=lambda row: row.admitted_s)
            if last in self._batch.rows:
                self._remember(last)
                self._batch.keep([i for i, row in enumerate(self._batch.rows) if row is not last])
            self._prefills = deque(pair for pair in self._prefills if pair[0] is not last)
            self._set_back.appendleft(last)
            self._observer.set_back()
            log.info("a sequence makes room for others", request=last.job.request.request_id)
        mx.clear_cache()

    def _go_on(self) -> None:
        """Let the first that was set back go on if all that it may need can be set aside."""
        row = self._set_back[0]
        if self._has_room(AHEAD_TOKENS, row.need(decoding=False)):
            self._set_back.popleft()
            row.reserved = True
            self._begin(row)

    # prompts --------------------------------------------------------------------------------------------------------

    def _begin(self, row: Running) -> None:
        """Run its prompt, and what it has drawn already."""
        loaded, tokens = self._loaded, [*row.job.request.prompt, *row.tokens]
        prefill = Prefill(loaded.model, tokens, loaded.make_cache(), loaded.prefill_step_tokens, loaded.prompt_cache)
        self._prefills.append((row, prefill))

    def _prefill(self) -> None:
        if not self._prefills:
            return
        running, prefill = self._prefills[0]
        job = running.job
        started = time.monotonic()
        try:
            if not prefill.complete:
                ran = prefill.advance(self._loaded.shared_step_tokens if self._batch.rows else None)
                if ran:
                    self._observer.prefilled(ran, time.monotonic() - started)
            job.prefilled_tokens = min(prefill.done_tokens, len(job.request.prompt))
        except Exception as error:
            self._prefills.popleft()
            log.error("a request failed in its prompt", exc_info=True, request=job.request.request_id)
            traceback.clear_frames(error.__traceback__)  # they hold the request's KV cache
            self._fail(running, error)
            return
        if prefill.complete and not job.cancelled:
            if self._batch.under_way:
                self._step(joining=True)
            self._prefills.popleft()
            if not running.tokens:
                running.cached_tokens = prefill.cached_tokens
            self._batch.join(running, prefill.cache)

    # steps ----------------------------------------------------------------------------------------------------------

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

    # ends -----------------------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        gone = [row for row in (*(row for row, _ in self._prefills), *self._set_back) if row.job.cancelled]
        if gone:
            self._prefills = deque(pair for pair in self._prefills if pair[0] not in gone)
            self._set_back = deque(row for row in self._set_back if row not in gone)
        rows = self._batch.rows
        if any(row.job.cancelled for row in rows):
            self._batch.keep([i for i, row in enumerate(rows) if not row.job.cancelled])
            gone += [row for row in rows if row.job.cancelled]
        for row in gone:
            self._finish(row)

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
