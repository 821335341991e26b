"""The worker's own copy of the checkpoint: where it is read, and who stays in the slots that are not pinned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from titan.common.experts import ExpertLayer
from titan.common.registry.shape import ModelShape
from titan.common.slots import make_policy
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import ExpertStore, ReaderPool

READERS = 4


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """`policy` is one of `titan.common.slots.POLICIES`."""

    shape: ModelShape
    store: ExpertStore
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
