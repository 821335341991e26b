"""Sequences that decode together: one forward pass gives each its next token. Knows no text, queue or thread.

A sequence joins with the KV cache of its own prefill, so no row is ever padded on its right and no padding token is
routed to an expert; where lengths differ, mlx-lm's batched caches hide the empty places on the left from attention.
One row alone runs on its plain cache: the same operations as mlx-lm's `generate_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx

from titan.common.log import get_logger
from titan.coordinator.generation.sampling import Sampler
from titan.coordinator.generation.step import Pending, Step, pending_step

__all__ = ["Batch", "LogitsProcessor", "Row"]

_STEPS_BETWEEN_CACHE_CLEARS = 256

log = get_logger("coordinator.engine")


class LogitsProcessor(Protocol):
    """Changes a sequence's logits before they are sampled."""

    @property
    def needs_tokens(self) -> bool:
        """Whether the logits of a step depend on the token before it; then steps cannot be looked ahead."""
        ...

    def __call__(self, logits: mx.array) -> mx.array:
        """logits: [1, vocabulary] -> [1, vocabulary]."""
        ...

    def accept(self, token: int) -> None:
        """Take the token that was drawn."""


class Row:
    """One sequence of a batch.

    Args:
        next_token: what the next step reads: first the prompt's last token, then the one drawn last.
        remaining: tokens still wanted.
        sampler: from log-probabilities [1, vocabulary] to a token [1].
        greedy: whether `sampler` takes the likeliest.
        top_logprobs: None for no log-probabilities, otherwise how many of the likeliest tokens to report.
    """

    def __init__(
        self,
        next_token: int,
        remaining: int,
        sampler: Sampler,
        *,
        greedy: bool,
        top_logprobs: int | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.next_token = next_token
        self.remaining = remaining
        self.sampler = sampler
        self.greedy = greedy
        self.top_logprobs = top_logprobs
        self.processors = tuple(processors)


R = TypeVar("R", bound=Row)


class Batch(Generic[R]):
    """Rows, their KV caches, and at most one step under way.

    Args:
        model: called as `model(tokens [rows, 1], cache=cache) -> logits [rows, 1, vocabulary]`.
    """

    def __init__(self, model: Callable[..., mx.array]) -> None:
        self.rows: list[R] = []
        self._model = model
        self._caches: list[Any] = []
        self._batched = False  # several rows: the caches are mlx-lm's batched ones
        self._pending: Pending | None = None
        self._length = 0  # places of the caches that finished steps, and the pending one, have filled
        self._steps = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def under_way(self) -> bool:
        """A step has been started whose tokens nobody has read yet."""
        return self._pending is not None

    def join(self, row: R, cache: list[Any]) -> None:
        """Add a sequence whose `cache` holds all its tokens but `row.next_token`. Not while a step is under way."""
        assert self._pending is None
        if not self.rows:
            self._caches, self._batched = cache, False
        else:
            for i, entry in enumerate(cache):
                mine = self._caches[i] if self._batched else self._caches[i].merge([self._caches[i]])
                mine.extend(entry.merge([entry]))
                mx.eval(mine.state)  # one layer at a time, so that only one exists twice
                self._caches[i] = mine
            self._batched = True
        self.rows.append(row)
        self._length = self._size(0)

    def keep(self, indices: list[int]) -> None:
        """Drop all rows but these (in order); their KV is free at once."""
        if len(indices) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in indices]
        if not indices:
            self._caches, self._pending, self._batched = [], None, False
            return
        if len(indices) == 1 and self._batched:
            self._caches = self._extracted(indices[0])
            self._batched = False
        else:
            for cache in self._caches:
                cache.filter(indices)
        self._length = self._size(0)
        if self._pending is not None:
            self._pending = self._pending.kept(indices)

    def step(self, *, lookahead: Callable[[], bool] = bool) -> list[Step]:
        """The next token of every row.

        Args:
            lookahead: asked once the step is started: start the one after it before its tokens are read? It is, if
                every row goes on and can.

        Raises:
            Exception: whatever the model raises; `step_apart` may still serve some rows.
        """
        pending = self._pending or self._issue(mx.array([row.next_token for row in self.rows]))
        self._pending = None
        if lookahead() and all(r.remaining > 1 and not any(p.needs_tokens for p in r.processors) for r in self.rows):
            try:
                self._pending = self._issue(pending.tokens)
            except Exception:
                log.warning("a step that was looked ahead failed and is tried again", exc_info=True)
                self.rewind()
        steps = pending.read([row.top_logprobs for row in self.rows])
        for row, step in zip(self.rows, steps, strict=True):
            _advance(row, step)
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CACHE_CLEARS == 0:
            mx.clear_cache()
        return steps

    def rewind(self) -> bool:
        """After a failed step: bring every layer's cache back to where it was. False where a cache cannot."""
        for i, cache in enumerate(self._caches):
            if not cache.is_trimmable():
                return False
            cache.trim(self._size(i) - self._length)
        return True

    def step_apart(self) -> list[Step | Exception]:
        """After `rewind`: step each row by itself; a row that fails gives its error and leaves the batch."""
        rows, caches = self.rows, [self._extracted(i) if self._batched else self._caches for i in range(len(self.rows))]
        self.keep([])
        outcomes: list[Step | Exception] = []
        survivors: list[tuple[R, list[Any]]] = []
        for row, cache in zip(rows, caches, strict=True):
            self.join(row, cache)
            try:
                outcomes.extend(self.step())
                survivors.append((row, self._caches))
            except Exception as error:
                log.warning("a sequence failed alone too", exc_info=True)
                outcomes.append(error)
            self.keep([])
        for row, cache in survivors:
            self.join(row, cache)
        return outcomes

    def settle(self) -> None:
        """Wait for the device: nothing unevaluated reads weights or caches afterwards."""
        if self._pending is not None:
            mx.eval(*self._pending.arrays)
        mx.eval([cache.state for cache in self._caches])

    def keys_and_values(self, index: int, start: int, end: int) -> list[tuple[mx.array, mx.array]]:
        """What tokens [start, end) of a row left in the cache, a layer: [heads, end - start, dimensions] each."""
        found = []
        for cache in self._caches:
            at = int(cache.left_padding[index].item()) if self._batched else 0
            keys, values = cache.keys, cache.values
            found.append((keys[index, :, at + start : at + end], values[index, :, at + start : at + end]))
        return found

    # ----------------------------------------------------------------------------------------------------------------

    def _issue(self, tokens: mx.array) -> Pending:
        logits = self._model(tokens[:, None], cache=self._caches)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sampled = self._sample(logits, logprobs)
        wanted = [row.top_logprobs for row in self.rows if row.top_logprobs is not None]
        pending = pending_step(logprobs, sampled, max(wanted, default=None))
        self._length = self._size(0)
        return pending

    def _sample(self, logits: mx.array, logprobs: mx.array) -> mx.array:
        """Tokens [rows]; one call where all rows are greedy."""
        if all(row.greedy and not row.processors for row in self.rows):
            return mx.argmax(logprobs, axis=-1)
        drawn = []
        for i, row in enumerate(self.rows):
            own = logprobs[i : i + 1]
            if row.processors:
                own = logits[i : i + 1]
                for processor in row.processors:
                    own = processor(own)
                own = own - mx.logsumexp(own, axis=-1, keepdims=True)
            drawn.append(row.sampler(own))
        return drawn[0] if len(drawn) == 1 else mx.concatenate(drawn)

    def _size(self, layer: int) -> int:
        return int(self._caches[layer].size())

    def _extracted(self, index: int) -> list[Any]:
        """The plain caches of one row."""
        found = []
        for cache in self._caches:
            own = cache.extract(index)
            mx.eval(own.state)
            found.append(own)
        return found


def _advance(row: Row, step: Step) -> None:
    row.next_token = step.token
    row.remaining -= 1
    for processor in row.processors:
        processor.accept(step.token)
