"""What a cluster learned about its model's routing, kept between starts: transitions, how often experts were used, and
how soon again.

Knows the files; not what is done with what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titan.common.errors import StoreError
from titan.common.experts import ExpertLayer
from titan.common.log import get_logger
from titan.common.prediction.state import load_state, save_state
from titan.common.prefetch.learned import recall, remember
from titan.common.prefetch.prefetcher import Prefetcher
from titan.common.prefetch.uses import recall_uses, remember_uses
from titan.common.registry import ModelShape
from titan.placement.reuse import LAGS, Reuse

log = get_logger("coordinator")


class LearnedRouting:
    """The files of one model in a folder.

    Args:
        folder: None keeps nothing.
    """

    def __init__(self, folder: Path | None, shape: ModelShape) -> None:
        self._folder, self._shape = folder, shape

    def recall(self, layers: Sequence[ExpertLayer], prefetcher: Prefetcher | None) -> None:
        """Begin with what earlier runs learned."""
        if self._folder is None:
            return
        shape = self._shape
        recall(self._file(self._folder, "routing"), shape.fingerprint, layers, prefetcher)
        recall_uses(self._file(self._folder, "uses"), shape.fingerprint, shape.num_experts, layers)

    def reuse(self) -> Reuse | None:
        """From row to row, as an earlier run saw it; None when there is no such file of this model."""
        if self._folder is None:
            return None
        shape = (len(self._shape.layers), len(LAGS))
        found = load_state(self._file(self._folder, "reuse"), self._shape.fingerprint, {"fresh": shape})
        if found is None:
            return None
        fresh = np.minimum.accumulate(np.clip(found["fresh"].astype(np.float64), 0.0, 1.0), axis=1)
        return tuple(tuple(row) for row in fresh.tolist())

    def remember(
        self, layers: Sequence[ExpertLayer], prefetcher: Prefetcher | None, reuse: Reuse | None = None
    ) -> None:
        """Keep it; a file that cannot be written is no reason to fail."""
        if self._folder is None:
            return
        shape = self._shape
        try:
            remember(self._file(self._folder, "routing"), shape.fingerprint, layers, prefetcher)
            remember_uses(self._file(self._folder, "uses"), shape.fingerprint, shape.num_experts, layers)
            if reuse is not None:
                save_state(self._file(self._folder, "reuse"), shape.fingerprint, {"fresh": np.array(reuse, np.float64)})
        except StoreError as error:
            log.warning("what was learned about routing is not kept", error=str(error))

    def _file(self, folder: Path, kind: str) -> Path:
        return folder / f"{kind}-{self._shape.fingerprint[:16]}.npz"
