"""What the generation engine needs of a model, however it was loaded.

Knows nothing of checkpoints, plans or workers: the MoE hook is a module inside `model` and cannot be told from
mlx-lm's own from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.coordinator.defaults import DEFAULT_PREFILL_STEP_TOKENS
from titan.coordinator.generation.grammar import Grammars
from titan.coordinator.generation.prompt_cache import PromptCache
from titan.coordinator.generation.room import GROWTH_TOKENS
from titan.coordinator.generation.vocabulary import Vocabulary

__all__ = ["DEFAULT_PREFILL_STEP_TOKENS", "LoadedModel", "ServedModel"]

DEFAULT_SHARED_STEP_TOKENS = 256


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. Made, used and closed on the engine's thread alone.

    Args:
        model: mlx-lm's module tree, called as `model(tokens [1, n], cache=cache) -> logits [1, n, vocabulary]`.
        tokenizer: mlx-lm's wrapper; the one part that other threads read.
        context_tokens: most tokens, prompt and answer together, that the model can hold.
        name: what clients call the model.
        make_cache: a fresh KV cache, one entry a layer.
        close: lets go of what `load` took (sessions, files, memory).
        prefill_step_tokens: prompt tokens a forward pass.
        shared_step_tokens: at most so many of them while other sequences decode, which wait for it.
        lookahead: asked at each step, whether to start the next one before the current token is read. It hides the
            host's work where a step runs wholly on the device; where every layer waits for its experts it brings
            nothing and costs a wasted step at the end of an answer.
        kv_tokens: places that KV memory is planned for, all sequences together; None takes what one may need.
        prompt_cache: keeps the KV of prompts; None for not at all.
    """

    model: Callable[..., mx.array]
    tokenizer: TokenizerWrapper
    context_tokens: int
    name: str
    make_cache: Callable[[], list[Any]]
    close: Callable[[], None]
    prefill_step_tokens: int = DEFAULT_PREFILL_STEP_TOKENS
    shared_step_tokens: int = DEFAULT_SHARED_STEP_TOKENS
    lookahead: Callable[[], bool] = lambda: True
    kv_tokens: int | None = None
    prompt_cache: PromptCache | None = None

    @property
    def kv_budget_tokens(self) -> int:
        """Never less than one request may need."""
        return max(self.kv_tokens or 0, self.context_tokens + GROWTH_TOKENS)


@dataclass(frozen=True)
class ServedModel:
    """The part of a loaded model that other threads may hold: no MLX objects in it."""

    name: str
    context_tokens: int
    tokenizer: TokenizerWrapper
    vocabulary: Vocabulary
    grammars: Grammars
