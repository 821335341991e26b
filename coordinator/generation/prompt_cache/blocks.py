"""Blocks of a prompt: runs of tokens with the keys and values they left, named by everything before them.

A block's name is a digest over the name of the block before it and its own tokens; the first one's predecessor is the
name of the model's setting (fingerprint, dtype, library versions). So a name stands for one exact KV content, and two
prompts that begin alike share their blocks. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

__all__ = ["BLOCK_TOKENS", "Block", "block_names", "setting_name"]

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Keys and values of BLOCK_TOKENS tokens: [layers, heads, BLOCK_TOKENS, dimensions] each."""

    keys: mx.array
    values: mx.array

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def setting_name(*parts: str) -> bytes:
    """What the first block of a prompt follows: everything besides tokens that KV depends on."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def block_names(setting: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Names of the whole blocks of `tokens`, first to last."""
    names: list[bytes] = []
    previous = setting
    ids = np.asarray(tokens, dtype="<u4")
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        data = ids[start : start + BLOCK_TOKENS].tobytes()
        previous = hashlib.blake2b(previous + data, digest_size=16).digest()
        names.append(previous)
    return names
