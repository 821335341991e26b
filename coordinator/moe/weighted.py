"""What the hook returns with wire precision `reduced`: outputs that are executed when their scores are known.

mlx-lm's block multiplies what the hook returns by the scores and sums over the experts:
`(y * scores[..., None]).sum(axis=-2)`, cast to `y.dtype` or not. These two objects answer to just that, so that the
scores can go to the workers. A family whose block does anything else is refused before (`Family.weighted_sum`).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

Sum = Callable[[mx.array], mx.array]  # scores [..., K] -> [..., D]


class Unweighted:
    """Stands for y: [..., K, D]. Has the shape and dtype that y would have."""

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype, total: Sum) -> None:
        self.shape = shape
        self.dtype = dtype
        self._total = total

    def __mul__(self, scores: mx.array) -> Weighted:
        """scores: [..., K, 1]."""
        if scores.shape != (*self.shape[:-1], 1):
            raise TypeError(f"outputs {self.shape} are weighted by scores [..., K, 1], not {scores.shape}")
        return Weighted(self, scores, self._total)


class Weighted:
    """Stands for y * scores: [..., K, D]."""

    def __init__(self, outputs: Unweighted, scores: mx.array, total: Sum) -> None:
        self.shape = outputs.shape
        self.dtype = mx.result_type(outputs.dtype, scores.dtype)
        self._scores, self._total = scores, total

    def sum(self, axis: int) -> mx.array:
        """The sum over the experts: executes them. [..., D] of this dtype."""
        if axis not in (-2, len(self.shape) - 2):
            raise TypeError(f"weighted outputs are summed over the experts, axis -2, not {axis}")
        return self._total(self._scores.squeeze(-1)).astype(self.dtype)
