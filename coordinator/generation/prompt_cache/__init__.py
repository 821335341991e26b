"""Keeps what prompts left in the KV cache, in memory and on disk, so that known beginnings are not run again."""

from titan.coordinator.generation.prompt_cache.blocks import BLOCK_TOKENS, setting_name
from titan.coordinator.generation.prompt_cache.cache import PromptCache, PromptCacheCounts, can_hold, fill
from titan.coordinator.generation.prompt_cache.disk import DiskBlocks
from titan.coordinator.generation.prompt_cache.open import open_prompt_cache

__all__ = [
    "BLOCK_TOKENS",
    "DiskBlocks",
    "PromptCache",
    "PromptCacheCounts",
    "can_hold",
    "fill",
    "open_prompt_cache",
    "setting_name",
]
