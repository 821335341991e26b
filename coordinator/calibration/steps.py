"""Decode steps of the host model with its MoE layers answered in a given way: what a layer costs is their difference.

In a step, requests and kernels come in the rhythm of decoding, with attention between them: a call that is made back
to back costs less than one for which a core, a cache and a peer have to wake up. On the thread that owns MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from titan.common.experts import ExpertLayer
from titan.coordinator.calibration.timing import Measured, measure
from titan.coordinator.host.model import HostModel
from titan.coordinator.moe.hook import Executor

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
SAMPLES = 25
BUDGET_S = 0.5


class DecodeSteps:
    """Times steps of one model. Leaves it unbound.

    Args:
        tables: a slot table for each of the model's layers; none is whole, so that every layer asks its executor.
    """

    def __init__(self, model: HostModel, tables: Mapping[int, ExpertLayer]) -> None:
        self._model, self._tables = model, tables

    @property
    def layers(self) -> int:
        return len(self._tables)

    def step(self, executor: Executor | None) -> Measured:
        """One greedy step after a short prompt; without an executor the experts give zeros at once."""
        model = self._model
        if executor is not None:
            model.bind(self._tables, executor)
        try:
            cache: list[Any] = make_prompt_cache(model.module)
            mx.eval(model(mx.array([PROMPT]), cache=cache))
            return measure(
                lambda: mx.eval(mx.argmax(model(mx.array([[9]]), cache=cache)[:, -1, :], axis=-1)),
                samples=SAMPLES,
                budget_s=BUDGET_S,
            )
        finally:
            model.unbind()
