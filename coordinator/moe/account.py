"""Who executed how much: counts for metrics, demos and tests. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Executed:
    """(row, expert) pairs executed so far, by where; `fallbacks` of the local ones had been sent to a worker in vain.

    `hedged` were executed here because a worker took unusually long; they count neither as local nor as remote.
    `retried` were sent to another worker after one had failed; who answered them counts them as well. `rescued` were
    sent to a worker that was not chosen first, after the disk here had failed.
    """

    local: int = 0
    ssd: int = 0
    fallbacks: int = 0
    retried: int = 0
    rescued: int = 0
    hedged: int = 0
    verified: int = 0  # answers that were computed here again
    remote: dict[str, int] = field(default_factory=dict)
    remote_layers: int = 0
    wait_s: float = 0.0

    def at_home(self, pairs: int, in_slots: int) -> None:
        """Count pairs executed here, `in_slots` of them with an expert that had not to be read."""
        self.local += in_slots
        self.ssd += pairs - in_slots
