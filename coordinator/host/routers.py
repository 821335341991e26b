"""Routers as those see them who do not route: what a MoE block would choose by, from its hidden states.

mlx-lm's own blocks route; predictions and traces only look. Knows the family's scoring, no caches and no experts.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from titan.common.registry.family import Family


class Router:
    """A MoE block's router, applied to hidden states.

    Args:
        block: mlx-lm's MoE block.
        family: how it routes, and where in the block its router lies.
    """

    def __init__(self, block: nn.Module, family: Family) -> None:
        self._router = descend(block, family.router)
        self._sigmoid = family.scoring == "sigmoid"
        self._correction: mx.array | None = descend(block, family.correction) if family.correction else None

    def __call__(self, x: mx.array) -> mx.array:
        """Preferences [N, E] of hidden states [N, D]: the router takes the largest, but for groups.

        Logits where it scores by softmax; corrected scores where it scores by sigmoid.
        """
        if not self._sigmoid:
            return self._logits(x)
        scores = mx.sigmoid(self._logits(x).astype(mx.float32))
        return scores if self._correction is None else scores + self._correction

    def probabilities(self, x: mx.array) -> mx.array:
        """Shares [N, E] of hidden states [N, D] in float32, summing to 1, without correction."""
        logits = self._logits(x).astype(mx.float32)
        if not self._sigmoid:
            return mx.softmax(logits, axis=-1, precise=True)
        scores = mx.sigmoid(logits)
        return scores / scores.sum(axis=-1, keepdims=True)

    def _logits(self, x: mx.array) -> mx.array:
        if isinstance(self._router, nn.Linear | nn.QuantizedLinear):
            logits: mx.array = self._router(x)
            return logits
        return x @ self._router.weight.T  # a gate of DeepSeek's kind answers with its choice


def descend(module: Any, path: str) -> Any:
    """The submodule or parameter at a dotted path, e.g. `model.layers.3.mlp`."""
    for part in path.split("."):
        module = module[int(part)] if part.isdecimal() else module[part]
    return module
