"""Recording the router's choices S_{t,l} and their probabilities while the model serves (`--trace FILE`).

Keeps what the hooks of one forward pass saw, and writes it when the pass is over, with the routers applied once more.
Recording synchronises once a pass; without it nothing here exists. A file that cannot be written ends the recording,
never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np

from titan.common.errors import StoreError
from titan.common.log import get_logger
from titan.common.registry import ModelShape
from titan.placement.trace import TraceHeader
from titan.placement.trace_file import TraceWriter

log = get_logger("coordinator.trace")

MAX_ROWS = 64  # a pass with more rows is prefill: its routing is recorded by the steps that follow, not row by row


class Router(Protocol):
    """A MoE layer's router."""

    def probabilities(self, x: mx.array) -> mx.array:
        """x: [N, D] -> [N, E] in float32."""
        ...


class Recorder:
    """Writes one record a forward pass of at most MAX_ROWS rows.

    Args:
        path: the trace file.
        shape: of the model.
        routers: the MoE layers' routers in the order they run.
    """

    def __init__(self, path: Path, shape: ModelShape, routers: Sequence[Router]) -> None:
        self._layers = tuple(spec.index for spec in shape.layers)
        self._top_k = shape.top_k
        self._routers = routers
        self._seen: dict[int, tuple[mx.array, mx.array]] = {}
        header = TraceHeader(shape.fingerprint, self._layers, shape.num_experts, shape.top_k)
        self._writer: TraceWriter | None = TraceWriter(path, header, probabilities=True)

    def saw(self, layer: int, x: mx.array, indices: mx.array) -> None:
        """Hidden states [..., D] of which the router of `layer` chose experts [..., K]."""
        rows = indices.size // self._top_k
        if rows <= MAX_ROWS:
            self._seen[layer] = (x.reshape(rows, -1), indices.reshape(rows, -1))

    def finish(self) -> None:
        """The forward pass is over: write it, if it was a whole one and no prefill."""
        seen, self._seen = self._seen, {}
        if self._writer is None or len(seen) != len(self._layers):
            return
        passes = [seen[layer] for layer in self._layers]
        if len({indices.shape for _, indices in passes}) != 1:
            return
        chosen = [indices for _, indices in passes]
        shares = [
            mx.take_along_axis(router.probabilities(x), indices, axis=-1)
            for router, (x, indices) in zip(self._routers, passes, strict=True)
        ]
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
