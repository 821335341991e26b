"""Finds the known beginning of a prompt, gives its keys and values back, and takes in what new prompts leave.

On the engine's thread alone: blocks in memory are MLX arrays. Works for models whose caches keep every token's keys
and values (mlx-lm's KVCache); others are left alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from titan.coordinator.generation.prompt_cache.blocks import BLOCK_TOKENS, Block, block_names
from titan.coordinator.generation.prompt_cache.disk import DiskBlocks
from titan.coordinator.generation.prompt_cache.file import FileBlock

__all__ = ["PromptCache", "PromptCacheCounts"]

KeysAndValues = Callable[[int, int], list[tuple[mx.array, mx.array]]]
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(slots=True)
class PromptCacheCounts:
    """Tokens asked for and found, blocks read from disk and dropped from memory, since the start."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    disk_blocks: int = 0
    evicted_blocks: int = 0


class PromptCache:
    """Blocks by name, the least recently used dropped first.

    Args:
        setting: name of all that KV depends on besides tokens (`setting_name`).
        max_bytes: of blocks in memory; 0 keeps none.
        disk: where blocks outlive memory and the process; None for nowhere.
    """

    def __init__(self, setting: bytes, max_bytes: int, disk: DiskBlocks | None = None) -> None:
        self.counts = PromptCacheCounts()
        self.nbytes = 0
        self._setting = setting
        self._max_bytes = max_bytes
        self._disk = disk
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    @property
    def disk(self) -> DiskBlocks | None:
        return self._disk

    def match(self, prompt: Sequence[int]) -> list[bytes]:
        """Names of the longest known beginning of `prompt`. Its last token is always left to be run."""
        names = block_names(self._setting, prompt[:-1])
        known = 0
        while known < len(names) and self._has(names[known]):
            known += 1
        self._touch(names[:known])
        return names[:known]

    def load(self, name: bytes) -> Block | None:
        """A block; None when it has gone meanwhile or is damaged on disk."""
        block = self._blocks.get(name)
        if block is not None:
            return block
        stored = self._disk.read(name) if self._disk is not None else None
        if stored is None:
            return None
        self.counts.disk_blocks += 1
        block = _from_file(stored)
        self._put(name, block)
        return block

    def insert(self, tokens: Sequence[int], keys_and_values: KeysAndValues) -> None:
        """Take in the whole blocks of `tokens` that are not in memory yet.

        Args:
            tokens: a prompt's tokens, and what came after them, as far as the KV cache holds them.
            keys_and_values: gives [heads, n, dimensions] of each layer for a range of tokens.
        """
        names = block_names(self._setting, tokens)
        missing = [i for i, name in enumerate(names) if name not in self._blocks]
        if not missing or not self._max_bytes:
            return
        first, end = missing[0], missing[-1] + 1
        layers = keys_and_values(first * BLOCK_TOKENS, end * BLOCK_TOKENS)
        keys = mx.stack([k for k, _ in layers])
        values = mx.stack([v for _, v in layers])
        fitting = self._max_bytes // ((keys.nbytes + values.nbytes) // (end - first))  # the beginning is worth most
        self._touch(names)
        fresh: list[tuple[bytes, Block]] = []
        for i in missing:
            if i >= fitting:
                break
            part = slice((i - first) * BLOCK_TOKENS, (i - first + 1) * BLOCK_TOKENS)
            fresh.append((names[i], Block(mx.contiguous(keys[:, :, part]), mx.contiguous(values[:, :, part]))))
        mx.eval([(block.keys, block.values) for _, block in fresh])
        for name, block in fresh:
            self._put(name, block)
            if self._disk is not None and name not in self._disk:
                self._disk.write(name, _to_file(block))
        self._touch(names)

    def clear(self) -> None:
        """Forget everything in memory."""
        self._blocks.clear()
        self.nbytes = 0

    def close(self) -> None:
        self.clear()
        if self._disk is not None:
            self._disk.close()

    def _has(self, name: bytes) -> bool:
        return name in self._blocks or (self._disk is not None and name in self._disk)

    def _touch(self, names: Sequence[bytes]) -> None:
        """Used now. The beginning counts as used last: without it, what follows is worth nothing."""
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)
            if self._disk is not None:
                self._disk.touch(name)

    def _put(self, name: bytes, block: Block) -> None:
        if name in self._blocks or block.nbytes > self._max_bytes:
            return
        self._blocks[name] = block
        self.nbytes += block.nbytes
        while self.nbytes > self._max_bytes:
            _, dropped = self._blocks.popitem(last=False)
            self.nbytes -= dropped.nbytes
            self.counts.evicted_blocks += 1


def can_hold(cache: Sequence[Any]) -> bool:
    """Whether blocks can be cut out of a model's KV cache and put back."""
    return bool(cache) and all(type(entry) is KVCache for entry in cache)


def fill(cache: Sequence[Any], blocks: Sequence[Block]) -> None:
    """Put `blocks` into an empty KV cache, as its first tokens."""
    for layer, entry in enumerate(cache):
        keys = mx.concatenate([block.keys[layer] for block in blocks], axis=1)[None]
        values = mx.concatenate([block.values[layer] for block in blocks], axis=1)[None]
        entry.state = (keys, values, keys.shape[2])
    mx.eval([entry.state for entry in cache])


def _to_file(block: Block) -> FileBlock:
    dtype = str(block.keys.dtype).removeprefix("mlx.core.")
    bits = mx.uint32 if block.keys.dtype == mx.float32 else mx.uint16
    return FileBlock(dtype, np.array(block.keys.view(bits)), np.array(block.values.view(bits)))


def _from_file(stored: FileBlock) -> Block:
    dtype = _DTYPES[stored.dtype]
    block = Block(mx.array(stored.keys).view(dtype), mx.array(stored.values).view(dtype))
    mx.eval(block.keys, block.values)
    return block
