"""The module that replaces mlx-lm's SwitchGLU, with the same call: `(x[..., D], indices[..., K]) -> y[..., K, D]`.

With wire precision `reduced`, y is an object that stands for the outputs until mlx-lm's block weights and sums them.

It never raises into mlx-lm's forward: a half-finished forward would leave the KV cache at different lengths in
different layers. A failure is recorded, zeros flow on, and the caller of the model finds the failure afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from titan.common.execution import apply_rows
from titan.common.experts import ExpertLayer
from titan.coordinator.moe.layer_times import LayerTimes
from titan.coordinator.moe.weighted import Unweighted


class Executor(Protocol):
    """Executes a layer's experts that are not all at home."""

    @property
    def reduced(self) -> bool:
        """Whether `execute` is to be given scores."""
        ...

    def execute(self, layer: int, x: mx.array, indices: mx.array, scores: mx.array | None = None) -> mx.array:
        """x: [..., D], indices: [..., K] -> outputs [..., K, D]; with scores [..., K] their weighted sums [..., D]."""
        ...

    def executed_at_home(self, pairs: int) -> None:
        """Count pairs of a layer that is wholly at home and never asks."""


class Faults:
    """The first failure of the current forward pass."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def record(self, error: Exception) -> None:
        self._error = self._error or error

    def take(self) -> Exception | None:
        error, self._error = self._error, None
        return error


class TitanSwitchGLU(nn.Module):
    """Experts of one layer behind mlx-lm's own interface. Does nothing until it is bound.

    Attributes begin with an underscore: mlx-lm's loader must not take them for parameters.
    """

    def __init__(self, layer: int, faults: Faults) -> None:
        super().__init__()
        self._layer = layer
        self._faults = faults
        self._local: ExpertLayer | None = None
        self._executor: Executor | None = None
        self._watch: Callable[[int, mx.array, mx.array], None] | None = None
        self._times: LayerTimes | None = None

    def watch(self, watch: Callable[[int, mx.array, mx.array], None] | None) -> None:
        """Call `watch(layer, x, indices)` with every choice of the router, before it is executed."""
        self._watch = watch

    def time(self, times: LayerTimes) -> None:
        """Take apart where the time goes, in the passes that are measured."""
        self._times = times

    def bind(self, local: ExpertLayer, executor: Executor) -> None:
        """Execute with these from now on. Not while a forward pass is under way."""
        self._local = local
        self._executor = executor

    def unbind(self) -> None:
        """Let go of experts and executor: zeros come out again."""
        self._local = self._executor = None

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array | Unweighted:
        """x: [..., D], indices: [..., K] -> y: [..., K, D], one output for each (row, expert)."""
        if self._local is None or self._executor is None:
            return mx.zeros((*indices.shape, x.shape[-1]), x.dtype)
        if self._watch is not None:
            self._watch(self._layer, x, indices)
        local, executor = self._local, self._executor
        if executor.reduced and not local.whole:
            shape = (*indices.shape, x.shape[-1])
            return Unweighted(shape, x.dtype, lambda scores: self._guarded(local, executor, x, indices, scores))
        return self._guarded(local, executor, x, indices, None)

    def _guarded(
        self, local: ExpertLayer, executor: Executor, x: mx.array, indices: mx.array, scores: mx.array | None
    ) -> mx.array:
        """Outputs, or with scores their sums; zeros after a failure, in this layer or before: nobody sees them."""
        try:
            if self._faults.failed:
                return self._zeros(x, indices, scores)
            if self._times is not None and self._times.measuring:
                run = partial(self._run, local, executor, x, indices, scores)
                return self._times.measure(self._layer, local, x, indices, run)
            return self._run(local, executor, x, indices, scores)
        except Exception as error:  # noqa: BLE001 - nothing may leave a half-finished forward behind
            self._faults.record(error)
            return self._zeros(x, indices, scores)

    @staticmethod
    def _zeros(x: mx.array, indices: mx.array, scores: mx.array | None) -> mx.array:
        return mx.zeros(x.shape if scores is not None else (*indices.shape, x.shape[-1]), x.dtype)

    def _run(
        self, local: ExpertLayer, executor: Executor, x: mx.array, indices: mx.array, scores: mx.array | None
    ) -> mx.array:
        if not local.whole:
            return executor.execute(self._layer, x, indices, scores)
        executor.executed_at_home(indices.size)  # expert e is in slot e: nothing to look up, no synchronisation
        return apply_rows(local.buffers, x, indices)
