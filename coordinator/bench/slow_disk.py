"""A disk as slow as you like: reads take as long as at a given rate, the rest of the time waited without the CPU.

On a machine whose compute is slow beside its disk this shows what a machine with it the other way round would do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from titan.common.errors import ConfigError
from titan.common.registry import Checkpoint
from titan.common.store import CacheMode, ExpertStore
from titan.common.store.expert_store import Targets
from titan.common.units import parse_size

__all__ = ["SlowStore", "parse_rate"]


class SlowStore(ExpertStore):
    """An ExpertStore on a device of `bytes_per_s` for all readers together.

    Args:
        bytes_per_s: 0 leaves the disk as it is.
        latency_s: of every call besides; several calls wait it out at once.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        bytes_per_s: float = 0.0,
        latency_s: float = 0.0,
        *,
        cache: CacheMode = CacheMode.PAGE_CACHE,
        verify: str = "first",
    ) -> None:
        super().__init__(checkpoint, cache=cache, verify=verify)
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._bytes = {layer.index: layer.expert_bytes for layer in checkpoint.shape.layers}
        self._free_s = 0.0  # when the device has done all that it was given
        self._device = threading.Lock()

    def read_experts(self, layer: int, experts: Sequence[int], targets: Sequence[Targets]) -> None:
        due_s = self._due(len(experts) * self._bytes[layer])
        super().read_experts(layer, experts, targets)
        left_s = due_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
            with self._device:
                self.counts.seconds += left_s

    def _due(self, nbytes: int) -> float:
        now_s = time.perf_counter()
        with self._device:
            took_s = nbytes / self._bytes_per_s if self._bytes_per_s else 0.0
            self._free_s = max(now_s, self._free_s) + took_s
            return self._free_s + self._latency_s


def parse_rate(text: str) -> int:
    """Bytes a second of `500MB/s`; 0 of an empty text.

    Raises:
        ConfigError: not a rate.
    """
    if not text:
        return 0
    size, slash, unit = text.partition("/")
    if slash and unit != "s":
        raise ConfigError(f"{text[:40]!r} is not a rate", "Write it as 500MB/s")
    return parse_size(size)
