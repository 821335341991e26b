"""HiGHS without its banner, single-threaded, with columns and rows added one at a time. Knows no placement."""

from __future__ import annotations

from collections.abc import Mapping

import highspy
import numpy as np

INFINITY = highspy.kHighsInf


class Highs(highspy.Highs):
    """A HiGHS model that writes nothing to standard output and uses one thread."""

    def enableCallbacks(self) -> None:
        """Called by the constructor, and the first thing that would print."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
        self.setOptionValue("threads", 1)

    def row(self, low: float, high: float, terms: Mapping[int, float] | None = None) -> int:
        """Add low <= sum of value * column <= high; returns the row's number."""
        index, value = _sparse(terms or {})
        self.addRow(low, high, len(index), index, value)
        return self.getNumRow() - 1

    def column(
        self,
        cost: float,
        high: float = INFINITY,
        terms: Mapping[int, float] | None = None,
        *,
        whole: bool = False,
    ) -> int:
        """Add a column in 0..high with entries by row; returns its number."""
        index, value = _sparse(terms or {})
        self.addCol(cost, 0.0, high, len(index), index, value)
        number = self.getNumCol() - 1
        if whole:
            self.changeColIntegrality(number, highspy.HighsVarType.kInteger)
        return number

    def values(self) -> np.ndarray:
        """The columns' values of the last run; empty when it found none."""
        return np.array(self.getSolution().col_value, dtype=np.float64)

    def is_optimal(self) -> bool:
        return self.getModelStatus() == highspy.HighsModelStatus.kOptimal


def _sparse(terms: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(terms), dtype=np.int32), np.array(list(terms.values()), dtype=np.float64)
