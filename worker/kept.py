"""Experts that are read into slots, when they are asked for, from what this worker keeps of what it was sent.

A file is held against its checksum when it is read for the first time; from then on its bytes go straight into the
slot. A file that is missing, shorter, or not what it was is removed, and whoever asked is told `ExpertLost`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from titan.common.arrays import DISK_DTYPES, widen
from titan.common.errors import ExpertLost
from titan.common.registry.shape import ModelShape
from titan.common.store import CacheMode, ReadCounts
from titan.worker.cache import ExpertCache


class KeptExperts:
    """Reads one model's experts out of a cache. Thread-safe.

    Args:
        mode: whether the pages of what was read are given back to the system.
    """

    def __init__(self, cache: ExpertCache, shape: ModelShape, mode: CacheMode = CacheMode.PAGE_CACHE) -> None:
        self.counts = ReadCounts()
        self._cache, self._shape = cache, shape
        self._drop_pages = mode is not CacheMode.PAGE_CACHE
        self._components = {s.index: [c for m in s.matrices for c in m.components] for s in shape.layers}
        self._lock = threading.Lock()

    def read_expert(self, layer: int, expert: int, targets: Sequence[np.ndarray]) -> None:
        """Fill the views of one slot.

        Raises:
            ExpertLost: it is not kept here, or not any more.
        """
        start = time.perf_counter()
        bits = [
            view if view.nbytes == c.nbytes else np.empty(c.shape, DISK_DTYPES[c.dtype][0])
            for view, c in zip(targets, self._components[layer], strict=True)
        ]
        if not self._cache.read_into(self._shape, layer, expert, bits, drop_pages=self._drop_pages):
            raise ExpertLost(
                f"expert {expert} of layer {layer} is not on this worker's disk any more", "it is sent again"
            )
        for view, part, component in zip(targets, bits, self._components[layer], strict=True):
            if part is not view:
                widen(part, component.dtype, view)
        elapsed, nbytes = time.perf_counter() - start, sum(c.nbytes for c in self._components[layer])
        with self._lock:
            self.counts.bytes += nbytes
            self.counts.reads += 1
            self.counts.experts += 1
            self.counts.seconds += elapsed

    def read_experts(self, layer: int, experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]]) -> None:
        """Fill several slots, one after another. Raises as `read_expert`."""
        for expert, views in zip(experts, targets, strict=True):
            self.read_expert(layer, expert, views)

    def read_cached(
        self,
        layer: int,  # noqa: ARG002
        experts: Sequence[int],
        targets: Sequence[Sequence[np.ndarray]],  # noqa: ARG002
    ) -> list[int]:
        """The places of those that a thread has to wait for: all of them."""
        return list(range(len(experts)))

    def close(self) -> None:
        """Nothing is open between two reads."""
