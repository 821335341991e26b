"""A store whose reads take longer than the disk needs: it stands for a slower disk. For measurements only."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from titan.common.registry import Checkpoint
from titan.common.store import CacheMode, ExpertStore

__all__ = ["SlowStore"]


class SlowStore(ExpertStore):
    """Waits `delay_s` for every expert before it reads it. Takes no CPU; the waits of several readers overlap."""

    def __init__(self, checkpoint: Checkpoint, cache: CacheMode, delay_s: float) -> None:
        super().__init__(checkpoint, cache=cache)
        self._delay_s = delay_s

    def read_experts(self, layer: int, experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]]) -> None:
        if self._delay_s:
            time.sleep(self._delay_s * len(experts))
        super().read_experts(layer, experts, targets)

    def read_cached(self, layer: int, experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]]) -> list[int]:
        if self._delay_s:
            return list(range(len(experts)))
        return super().read_cached(layer, experts, targets)
