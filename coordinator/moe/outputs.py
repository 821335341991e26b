"""What comes of a layer's (row, expert) pairs, collected from those who executed them, each pair once.

Knows how parts are put together; not who brings them or when.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES, from_raw_bits, raw_bits
from titan.common.execution import weighted_sums
from titan.coordinator.moe.pairs import join, same_outputs

VERIFIED_PAIRS = 16  # of an answer that is looked at


class PairOutputs:
    """One output a pair, as wire precision `exact` has it.

    Args:
        pairs: P of the layer.
        remote_pairs: how many of them workers are likely to answer.
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
        if end > self._answers.shape[0]:  # what was to be executed here has gone to a worker after all
            more = np.empty((end - self._answers.shape[0], self._answers.shape[1]), self._answers.dtype)
            self._answers = np.concatenate([self._answers, more])
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


class RowSums:
    """One score-weighted sum a row, as wire precision `reduced` has it; accumulated in float32.

    Args:
        pair_rows: [P] row of each pair.
        scores: [P] of float32.
        rows: N of the layer.
        dtype: name of the compute dtype, in which answers come.
    """

    def __init__(self, pair_rows: np.ndarray, scores: np.ndarray, rows: int, dtype: str) -> None:
        self._pair_rows, self._scores, self._count, self._dtype = pair_rows, scores, rows, dtype
        self._parts: list[mx.array] = []
        self._rows: list[np.ndarray] = []  # of each part, ascending

    def add(self, positions: np.ndarray, y: mx.array) -> None:
        """This machine's outputs y: [p, D] of the pairs at `positions`."""
        rows, sums = self._sums(positions, y)
        self._parts.append(sums)
        self._rows.append(rows)

    def add_answer(self, positions: np.ndarray, outputs: np.ndarray) -> None:
        """A worker's sums for the pairs at `positions`, of their distinct rows in ascending order; copied."""
        self._parts.append(from_raw_bits(outputs, COMPUTE_DTYPES[self._dtype][1]).astype(mx.float32))
        self._rows.append(np.unique(self._pair_rows[positions]))

    def to_verify(self, positions: np.ndarray) -> np.ndarray:
        """The pairs by which an answer for `positions` is checked: those of its first rows."""
        rows = self._pair_rows[positions]
        distinct, pairs = np.unique(rows, return_counts=True)
        count = max(1, int(np.searchsorted(np.cumsum(pairs), VERIFIED_PAIRS, side="right")))
        return positions[np.isin(rows, distinct[:count])]

    def agrees(self, checked: np.ndarray, mine: mx.array, outputs: np.ndarray) -> bool:
        """Whether an answer is what this machine computed: mine: [p, D] for the pairs `checked`."""
        rows, sums = self._sums(checked, mine)
        return same_outputs(raw_bits(sums.astype(mine.dtype)), outputs[: rows.size], self._dtype)

    def joined(self) -> mx.array:
        """[N, D] of float32, once every pair has been added."""
        total = None
        for rows, sums in zip(self._rows, self._parts, strict=True):
            if rows.size < self._count:
                empty = mx.zeros((self._count, sums.shape[1])) if total is None else total
                total = empty.at[mx.array(rows)].add(sums)
            else:
                total = sums if total is None else total + sums
        assert total is not None, "a layer has pairs"
        return total

    def _sums(self, positions: np.ndarray, y: mx.array) -> tuple[np.ndarray, mx.array]:
        """The distinct rows of some pairs, ascending, and their sums."""
        rows, places = np.unique(self._pair_rows[positions], return_inverse=True)
        return rows, weighted_sums(y, places, self._scores[positions], rows.size)
