"""Recording the router's choices S_{t,l} and their probabilities while the model serves (`--trace FILE`).

Keeps what the hooks and routers of one forward pass saw, and writes it when the pass is over. Recording synchronises
once a pass; without it nothing here exists. A file that cannot be written ends the recording, never an answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from titan.common.errors import StoreError
from titan.common.log import get_logger
from titan.common.registry import ModelShape
from titan.placement.trace import TraceHeader
from titan.placement.trace_file import TraceWriter

log = get_logger("coordinator.trace")

MAX_ROWS = 64  # a pass with more rows is prefill: its routing is recorded by the steps that follow, not row by row


class WatchedRouter(nn.Module):
    """mlx-lm's router with its last logits kept. Attributes begin with an underscore, see TitanSwitchGLU."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self._router = router
        self._logits: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        logits: mx.array = self._router(x)
        self._logits = logits
        return logits

    def take(self) -> mx.array | None:
        """Logits [..., E] of the last call, once."""
        logits, self._logits = self._logits, None
        return logits


class Recorder:
    """Writes one record a forward pass of at most MAX_ROWS rows.

    Args:
        path: the trace file.
        shape: of the model.
        routers: by the model's layer number.
    """

    def __init__(self, path: Path, shape: ModelShape, routers: dict[int, WatchedRouter]) -> None:
        self._layers = tuple(spec.index for spec in shape.layers)
        self._top_k = shape.top_k
        self._routers = routers
        self._seen: dict[int, mx.array] = {}
        header = TraceHeader(shape.fingerprint, self._layers, shape.num_experts, shape.top_k)
        self._writer: TraceWriter | None = TraceWriter(path, header, probabilities=True)

    def saw(self, layer: int, indices: mx.array) -> None:
        """indices: [..., K] that the router of `layer` chose."""
        self._seen[layer] = indices

    def finish(self) -> None:
        """The forward pass is over: write it, if it was a whole one and no prefill."""
        seen, self._seen = self._seen, {}
        logits = {layer: router.take() for layer, router in self._routers.items()}
        if self._writer is None or len(seen) != len(self._layers):
            return
        rows = seen[self._layers[0]].size // self._top_k
        if rows > MAX_ROWS or any(indices.size != rows * self._top_k for indices in seen.values()):
            return
        chosen = [seen[layer].reshape(rows, self._top_k) for layer in self._layers]
        shares = [_shares(logits[layer], indices) for layer, indices in zip(self._layers, chosen, strict=True)]
        mx.eval(chosen, shares)
        try:
            self._writer.write(np.stack([np.array(i) for i in chosen]), np.stack([np.array(s) for s in shares]))
        except StoreError as error:
            log.warning(str(error))
            self._writer = None

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except StoreError as error:
            log.warning(str(error))


def _shares(logits: mx.array | None, indices: mx.array) -> mx.array:
    """Probabilities [rows, K] that softmax over all experts gives the chosen; zeros when the logits were not seen."""
    if logits is None:
        return mx.zeros(indices.shape, mx.float32)
    flat = mx.softmax(logits.reshape(indices.shape[0], -1).astype(mx.float32), axis=-1, precise=True)
    return mx.take_along_axis(flat, indices, axis=-1)
