"""What a worker reads experts from when they are asked for, and who stays in the slots that are not pinned.

That is a copy of the checkpoint, or what it keeps of the experts that it was sent (`kept`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from titan.common.experts import ExpertLayer
from titan.common.registry.shape import ModelShape
from titan.common.slots import make_policy
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import ReadCounts, ReaderPool

READERS = 4


class Reads(Protocol):
    """Fills views with experts: `ExpertStore`, `KeptExperts`."""

    counts: ReadCounts

    def read_expert(self, layer: int, expert: int, targets: Sequence[np.ndarray]) -> None: ...

    def read_experts(self, layer: int, experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]]) -> None: ...

    def read_cached(self, layer: int, experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]]) -> list[int]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """`policy` is one of `titan.common.slots.POLICIES`."""

    shape: ModelShape
    store: Reads
    readers: ReaderPool
    policy: str = "lru"

    def layer(self, buffers: LayerBuffers) -> ExpertLayer:
        """An empty table that reads what it is asked for from this copy."""
        return ExpertLayer(
            buffers,
            self.store.read_expert,
            make_policy(self.policy, self.shape.num_experts),
            self.readers,
            fill_many=self.store.read_experts,
            fill_cached=self.store.read_cached,
        )

    def read(self, layer: int, expert: int, targets: Sequence[np.ndarray]) -> None:
        """Fill `targets` with one expert. Raises as `ExpertStore.read_expert`, and DiskStalled as `ReaderPool`."""
        self.readers.run_all([partial(self.store.read_expert, layer, expert, targets)])

    def close(self) -> None:
        self.readers.close()
        self.store.close()
