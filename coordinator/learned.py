"""What a cluster learned about its model's routing, kept between starts: transitions, and how often experts were used.

Knows the two files; not what is done with what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titan.common.errors import StoreError
from titan.common.experts import ExpertLayer
from titan.common.log import get_logger
from titan.common.prefetch.learned import recall, remember
from titan.common.prefetch.prefetcher import Prefetcher
from titan.common.prefetch.uses import recall_uses, remember_uses
from titan.common.registry import ModelShape

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

    def remember(self, layers: Sequence[ExpertLayer], prefetcher: Prefetcher | None) -> None:
        """Keep it; a file that cannot be written is no reason to fail."""
        if self._folder is None:
            return
        shape = self._shape
        try:
            remember(self._file(self._folder, "routing"), shape.fingerprint, layers, prefetcher)
            remember_uses(self._file(self._folder, "uses"), shape.fingerprint, shape.num_experts, layers)
        except StoreError as error:
            log.warning("what was learned about routing is not kept", error=str(error))

    def _file(self, folder: Path, kind: str) -> Path:
        return folder / f"{kind}-{self._shape.fingerprint[:16]}.npz"
