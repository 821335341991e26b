"""A request that has been admitted: its job, its sampling, its answer so far. Knows neither model nor queue."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items

from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.common.errors import EngineFailed, TitanError
from titan.coordinator.generation.batch import LogitsProcessor, Row
from titan.coordinator.generation.events import Finished, FinishReason, Timings, Usage
from titan.coordinator.generation.handle import Job
from titan.coordinator.generation.observer import Observer
from titan.coordinator.generation.room import Need
from titan.coordinator.generation.sampling import make_sampler
from titan.coordinator.generation.sequence import Sequence
from titan.coordinator.generation.step import Step

__all__ = ["Running"]


class Running(Row):
    """A row of the batch that belongs to a request."""

    def __init__(
        self, job: Job, tokenizer: TokenizerWrapper, processors: Items[LogitsProcessor], observer: Observer
    ) -> None:
        request = job.request
        super().__init__(
            next_token=request.prompt[-1],
            remaining=request.max_tokens,
            sampler=make_sampler(request.sampling),
            greedy=request.sampling.greedy,
            top_logprobs=request.top_logprobs,
            processors=processors,
        )
        self.job = job
        self.sequence = Sequence(tokenizer, request)
        self.cached_tokens = 0
        self.asleep = False  # the reader has something new and was not woken yet
        self.reserved = False  # all that it may come to need is set aside: it is not set back (again)
        self.tokens: list[int] = []  # that were drawn; the last one is not in the KV cache yet
        self._observer = observer
        self.admitted_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self.admitted_s

    def need(self, *, decoding: bool) -> Need:
        """Places in the KV cache that it fills, and may come to fill."""
        prompt = len(self.job.request.prompt)
        return Need(prompt + len(self.tokens), prompt + self.job.request.max_tokens, decoding)

    def take(self, step: Step, now: float) -> bool:
        """Take the next token, deliver what became final; True when the answer has ended."""
        if self._first_s is None:
            self._first_s = now
            self.job.prefilled_tokens = len(self.job.request.prompt)
            self._observer.first_token(now - self.job.submitted_s)
        else:
            self._observer.next_token(now - self._last_s)
        self._last_s = now
        self.tokens.append(step.token)
        delta = self.sequence.push(step)
        self.job.generated_tokens = self.sequence.generated_tokens
        self.asleep = delta is not None and self.job.post(delta)
        return self.sequence.reason is not None

    def finished(self) -> Finished:
        """The last event: the answer has ended, or is cut off here."""
        if self.sequence.reason is None and (rest := self.sequence.finish()) is not None:
            self.job.deliver(rest)
        reason: FinishReason = self.sequence.reason or "cancelled"
        return Finished(reason, self.usage(), self.timings(), self.sequence.stop_string)

    def failed(self, error: Exception) -> EngineFailed:
        """What the client is told of `error`."""
        cause = error.cause if isinstance(error, TitanError) else f"{type(error).__name__} in the model"
        return EngineFailed(
            f"generation failed: {cause}",
            f"try again; the coordinator's log has it under {self.job.request.request_id}",
        )

    def usage(self) -> Usage:
        return Usage(len(self.job.request.prompt), self.sequence.generated_tokens, self.cached_tokens)

    def timings(self) -> Timings:
        now = time.monotonic()
        first_s = now if self._first_s is None else self._first_s
        return Timings(self.admitted_s - self.job.submitted_s, first_s - self.admitted_s, now - first_s)
