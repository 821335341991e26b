"""Whether a layer is read section by section or group by group through its slots: measured seconds an expert of each.

Knows durations and counts, nothing of experts.
"""

from __future__ import annotations

__all__ = ["ReadRates"]

WEIGHT = 0.2  # of a new sample
LOOK_AGAIN = 64  # choices; then the dearer way is measured once more


class ReadRates:
    """Seconds an expert: `sequential_s` of a section, `scattered_s` of a group of slots; None until measured."""

    def __init__(self) -> None:
        self.sequential_s: float | None = None
        self.scattered_s: float | None = None
        self._choices = 0

    def read_sequentially(self, experts: int, seconds: float) -> None:
        self.sequential_s = _mean(self.sequential_s, seconds / experts)

    def read_scattered(self, experts: int, seconds: float) -> None:
        self.scattered_s = _mean(self.scattered_s, seconds / experts)

    def sequential_pays(self, missing: int, read: int) -> bool:
        """Whether reading `read` experts in sections is no slower than reading the `missing` ones into slots.

        What was never measured is tried first, and the dearer way again now and then.
        """
        self._choices += 1
        if self.sequential_s is None:
            return True
        if self.scattered_s is None:
            return False
        pays = read * self.sequential_s <= missing * self.scattered_s
        return pays if self._choices % LOOK_AGAIN else not pays


def _mean(before: float | None, sample: float) -> float:
    return sample if before is None else before + WEIGHT * (sample - before)
