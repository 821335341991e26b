"""How good a predictor is: recall r, precision q, and r' among the experts that would have missed.

Counts per rank, because a prefetcher asks how far down a list it pays to read. Knows sets of experts only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

__all__ = ["PredictionScore"]


class PredictionScore:
    """Counts over predictions of at most `ranks` experts.

    `used[i]` of `said[i]` experts at rank i were chosen. Kept twice: over all predicted experts (for r and q), and over
    those that were not in memory when they were predicted (for r', and for what a prefetch can gain).
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.said = np.zeros(ranks)
        self.used = np.zeros(ranks)
        self.absent_said = np.zeros(ranks)
        self.absent_used = np.zeros(ranks)
        self.chosen = 0.0
        self.would_miss = 0.0
        self.steps = 0.0

    def add(
        self, predicted: Sequence[int], absent: Sequence[int], chosen: Collection[int], would_miss: Collection[int]
    ) -> None:
        """One step of one layer.

        Args:
            predicted: experts ranked, best first.
            absent: those of them that were not in memory, best first.
            chosen: what the router chose.
            would_miss: those of the chosen that would not have been in memory without prefetch.
        """
        for experts, said, used in (
            (predicted, self.said, self.used),
            (absent, self.absent_said, self.absent_used),
        ):
            for rank, expert in enumerate(experts[: self.ranks]):
                said[rank] += 1
                if expert in chosen:
                    used[rank] += 1
        self.chosen += len(chosen)
        self.would_miss += len(would_miss)
        self.steps += 1

    def decay(self, factor: float) -> None:
        """Forget: routing drifts with the text."""
        for array in (self.said, self.used, self.absent_said, self.absent_used):
            array *= factor
        self.chosen *= factor
        self.would_miss *= factor
        self.steps *= factor

    def recall(self, m: int) -> float:
        """r: share of the chosen experts that the first m predictions name."""
        return float(self.used[:m].sum() / self.chosen) if self.chosen else 0.0

    def precision(self, m: int) -> float:
        """q: share of the first m predictions that are chosen."""
        said = self.said[:m].sum()
        return float(self.used[:m].sum() / said) if said else 0.0

    def recall_of_misses(self, m: int) -> float:
        """r': share of the would-be misses that the first m absent predictions name."""
        return min(1.0, float(self.absent_used[:m].sum() / self.would_miss)) if self.would_miss else 0.0

    def shares(self) -> np.ndarray:
        """[ranks]: how often the expert at each rank was chosen, wherever it was; pessimistic while little is known."""
        return self.used / (self.said + 1.0)

    def chances(self) -> np.ndarray:
        """[ranks]: how often the absent expert at each rank was chosen; pessimistic while little is known."""
        return self.absent_used / (self.absent_said + 1.0)
