"""The worker's own copy of the checkpoint: where it is read, and who stays in the slots that are not pinned."""

from __future__ import annotations

from dataclasses import dataclass

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
        )

    def close(self) -> None:
        self.readers.close()
        self.store.close()
