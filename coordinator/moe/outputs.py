"""What comes of a layer's (row, expert) pairs, collected from those who executed them, each pair once.

Knows how parts are put together; not who brings them or when.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES, from_raw_bits, raw_bits
from titan.coordinator.moe.pairs import join, same_outputs

VERIFIED_PAIRS = 16  # of an answer that is looked at


class PairOutputs:
    """One output a pair, as wire precision `exact` has it.

    Args:
        pairs: P of the layer.
        remote_pairs: how many of them at most workers answer.
        hidden_size: D.
        dtype: name of the compute dtype.
    """

    def __init__(self, pairs: int, remote_pairs: int, hidden_size: int, dtype: str) -> None:
        self._pairs, self._dtype = pairs, dtype
        self._parts: list[mx.array] = []
        self._positions: list[np.ndarray] = []
        self._answers = np.empty((remote_pairs, hidden_size), COMPUTE_DTYPES[dtype][0])
        self._answered: list[np.ndarray] = []
        self._filled = 0

    def add(self, positions: np.ndarray, y: mx.array) -> None:
        """This machine's outputs y: [p, D] of the pairs at `positions`."""
        self._parts.append(y)
        self._positions.append(positions)

    def add_answer(self, positions: np.ndarray, outputs: np.ndarray) -> None:
        """A worker's answer for the pairs at `positions`; copied."""
        end = self._filled + positions.size
        self._answers[self._filled : end] = outputs
        self._filled = end
        self._answered.append(positions)

    def to_verify(self, positions: np.ndarray) -> np.ndarray:
        """The pairs by which an answer for `positions` is checked."""
        return positions[:VERIFIED_PAIRS]

    def agrees(self, checked: np.ndarray, mine: mx.array, outputs: np.ndarray) -> bool:
        """Whether an answer is what this machine computed: mine: [p, D] for the pairs `checked`."""
        return same_outputs(raw_bits(mine), outputs[: checked.size], self._dtype)

    def joined(self) -> mx.array:
        """[P, D] in the order of the pairs, once every pair has been added."""
        if self._filled:
            self.add(np.concatenate(self._answered), from_raw_bits(self._answers[: self._filled], self._mx_dtype))
        return join(self._parts, self._positions, self._pairs)

    @property
    def _mx_dtype(self) -> mx.Dtype:
        return COMPUTE_DTYPES[self._dtype][1]
