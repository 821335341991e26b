"""One step of decoding as values: the tokens it gave, and a step that may still be computed. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import mlx.core as mx

from titan.coordinator.generation.events import TokenLogprob

__all__ = ["Pending", "Step", "pending_step"]


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token, and its log-probabilities when they were asked for."""

    token: int
    logprob: TokenLogprob | None


class Pending(NamedTuple):
    """Tokens [rows]; log-probabilities of these [rows, 1]; ids and values of the likeliest [rows, top]."""

    tokens: mx.array
    chosen: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return tuple(array for array in self if array is not None)

    def kept(self, indices: list[int]) -> Pending:
        """The step of some of its rows."""
        at = mx.array(indices)
        chosen, ids, values = (None if array is None else array[at] for array in self[1:])
        return Pending(self.tokens[at], chosen, ids, values)

    def read(self, wanted: Sequence[int | None]) -> list[Step]:
        """Wait for the step.

        Args:
            wanted: for each row, None or how many of the likeliest tokens to report.
        """
        tokens = cast("list[int]", self.tokens.tolist())
        if self.chosen is None:
            return [Step(token, None) for token in tokens]
        chosen = cast("list[list[float]]", self.chosen.tolist())
        ids, values = self._likeliest(len(tokens))
        steps = []
        for row, (token, top) in enumerate(zip(tokens, wanted, strict=True)):
            if top is None:
                steps.append(Step(token, None))
                continue
            best = sorted(zip(ids[row], values[row], strict=True), key=lambda pair: (-pair[1], pair[0]))
            steps.append(Step(token, TokenLogprob(token, chosen[row][0], tuple(best[:top]))))
        return steps

    def _likeliest(self, rows: int) -> tuple[list[list[int]], list[list[float]]]:
        if self.top_ids is None or self.top_logprobs is None:
            return [[]] * rows, [[]] * rows
        return cast("list[list[int]]", self.top_ids.tolist()), cast("list[list[float]]", self.top_logprobs.tolist())


def pending_step(logprobs: mx.array, sampled: mx.array, top: int | None) -> Pending:
    """A step that drew `sampled` [rows] from `logprobs` [rows, vocabulary], and begin to compute it.

    Args:
        top: None for no log-probabilities, otherwise how many of the likeliest tokens to report.
    """
    if top is None:
        pending = Pending(sampled)
    else:
        chosen = mx.take_along_axis(logprobs, sampled[:, None], axis=-1)
        pending = Pending(sampled, chosen)
        top = min(top, logprobs.shape[-1])
        if top:
            likeliest = mx.argpartition(-logprobs, kth=top - 1, axis=-1)[:, :top]
            pending = Pending(sampled, chosen, likeliest, mx.take_along_axis(logprobs, likeliest, axis=-1))
    mx.async_eval(*pending.arrays)
    return pending
