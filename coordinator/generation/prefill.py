"""One prompt on its way into the KV cache: known blocks are put in, the rest is run in chunks.

A prompt is run alone, without padding, in the chunks that mlx-lm's `generate_step` would use; each call does a bounded
piece, so that other sequences can step in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from titan.coordinator.generation.prompt_cache import BLOCK_TOKENS, PromptCache, can_hold, fill
from titan.coordinator.generation.prompt_cache.blocks import Block

__all__ = ["Prefill"]


class Prefill:
    """Runs all tokens of a prompt but the last, which the first decode step reads.

    Args:
        model: called as `model(tokens [1, n], cache=cache)`.
        prompt: token ids, at least one.
        cache: the sequence's own, empty.
        prompt_cache: where known beginnings come from; None for nowhere.
    """

    def __init__(
        self,
        model: Callable[..., mx.array],
        prompt: Sequence[int],
        cache: list[Any],
        step_tokens: int,
        prompt_cache: PromptCache | None,
    ) -> None:
        self.cache = cache
        self.done_tokens = self.cached_tokens = 0
        self._model = model
        self._prompt = prompt
        self._step_tokens = step_tokens
        self._prompt_cache = prompt_cache if prompt_cache is not None and can_hold(cache) else None
        self._names = self._prompt_cache.match(prompt) if self._prompt_cache is not None else []
        self._blocks: list[Block] = []

    @property
    def complete(self) -> bool:
        return not self._names and self.done_tokens >= len(self._prompt) - 1

    def advance(self, at_most: int | None = None) -> int:
        """Do the next piece: fetch one known block, or run one chunk. Returns the tokens that were run.

        Args:
            at_most: tokens of a chunk, if fewer than usual.
        """
        if self._names:
            self._fetch(self._names)
            return 0
        last = len(self._prompt) - 1
        count = min(self._step_tokens, at_most or self._step_tokens, last - self.done_tokens)
        if count > 0:
            chunk = mx.array(list(self._prompt[self.done_tokens : self.done_tokens + count]))
            self._model(chunk[None], cache=self.cache)
            mx.eval([entry.state for entry in self.cache])
            mx.clear_cache()
            self.done_tokens += count
        if self.complete:
            self._remember()
        return count

    def _fetch(self, names: list[bytes]) -> None:
        assert self._prompt_cache is not None
        block = self._prompt_cache.load(names[0])
        if block is None:  # it has gone since, and so nothing after it can be used
            names.clear()
        else:
            self._blocks.append(block)
            del names[0]
        if not names and self._blocks:
            fill(self.cache, self._blocks)
            self.done_tokens = self.cached_tokens = len(self._blocks) * BLOCK_TOKENS
            self._blocks.clear()

    def _remember(self) -> None:
        if self._prompt_cache is None:
            return
        self._prompt_cache.counts.prompt_tokens += len(self._prompt)
        self._prompt_cache.counts.reused_tokens += self.cached_tokens

        def keys_and_values(start: int, end: int) -> list[tuple[mx.array, mx.array]]:
            return [(entry.keys[0, :, start:end], entry.values[0, :, start:end]) for entry in self.cache]

        self._prompt_cache.insert(self._prompt[:-1], keys_and_values)
