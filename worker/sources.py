"""Where an expert that is to be installed comes from: a checkpoint here, what was kept here, or the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from titan.common.experts import Fill
from titan.common.metrics import Tally
from titan.worker.cache import ExpertCache


@dataclass(frozen=True, slots=True)
class Sources:
    """In the order in which they are asked; the coordinator is the last.

    Args:
        checkpoint: reads from the worker's own copy, which has every expert.
        cache: what it was sent before.
        installed: bytes by source: "checkpoint", "cache" or "pushed".
    """

    checkpoint: Fill | None = None
    cache: ExpertCache | None = None
    installed: Tally = field(default_factory=lambda: Tally("source"))
