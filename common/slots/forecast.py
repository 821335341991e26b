"""The policy that looks ahead: whoever the router is least likely to choose soon goes first.

It learns, online, how often an expert follows another within the next few tokens of the same layer. Knows experts
and the order in which they were chosen, no slots and no time.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

DISCOUNT = 0.5  # a use k tokens ahead counts 0.5^(k - 1)
RECENCY = 0.97
RECENCY_WEIGHT = 0.3
EVIDENCE_WEIGHT = 0.5  # the chosen experts are not independent witnesses
PRIOR_USES = 4.0
SMALLEST_TRACE = 0.05


class Successors:
    """Discounted counts: how often expert j was chosen within the tokens after expert i.

    `counts[i, j]` is the sum of 0.5^(k - 1) over all tokens k after a choice of i at which j was chosen, `uses[i]` the
    number of choices of i: together a learned successor representation of the router in one layer.
    """

    def __init__(self, num_experts: int) -> None:
        self.counts = np.zeros((num_experts, num_experts), np.float32)
        self.uses = np.zeros(num_experts, np.float32)
        self.steps = np.zeros(1, np.float64)
        self._trace: dict[int, float] = {}

    def observe(self, experts: Sequence[int]) -> None:
        """One token's choice."""
        chosen = np.fromiter(experts, np.intp, len(experts))
        if self._trace:
            before = np.fromiter(self._trace, np.intp, len(self._trace))
            weights = np.fromiter(self._trace.values(), np.float32, len(self._trace))
            self.counts[before[:, None], chosen] += weights[:, None]
        self.uses[chosen] += 1
        self.steps += 1
        self._trace = {e: w * DISCOUNT for e, w in self._trace.items() if w * DISCOUNT >= SMALLEST_TRACE}
        for expert in experts:
            self._trace[expert] = self._trace.get(expert, 0.0) + 1.0

    def likelihood(self, experts: Sequence[int]) -> np.ndarray:
        """[E]: discounted uses to expect of every expert after `experts` were chosen."""
        base = (self.uses + 0.1) / (self.steps[0] + 1) / (1 - DISCOUNT)
        chosen = np.fromiter(experts, np.intp, len(experts))
        rates = (self.counts[chosen] + PRIOR_USES * base) / (self.uses[chosen, None] + PRIOR_USES)
        return base * np.exp(EVIDENCE_WEIGHT * np.log(rates / base).sum(axis=0))


class Forecast:
    """Evicts the expert with the smallest forecast: learned successors of the last choice plus recency.

    Args:
        num_experts: E.
        largest_choice: choices of more experts than this (a prompt's many rows) teach nothing about the next token.
    """

    def __init__(self, num_experts: int, largest_choice: int | None = None) -> None:
        self.successors = Successors(num_experts)
        self._largest = largest_choice or max(1, num_experts // 2)
        self._recent = np.zeros(num_experts, np.float32)
        self._last: tuple[int, ...] = ()
        self._value: np.ndarray | None = None
        self._evictable: dict[int, None] = {}

    def selected(self, experts: Sequence[int]) -> None:
        self._recent *= RECENCY
        self._recent[list(experts)] += 1 - RECENCY
        self._value = None
        self._last = ()
        if len(experts) <= self._largest:
            self.successors.observe(experts)
            self._last = tuple(experts)

    def used(self, expert: int) -> None:
        self._evictable[expert] = None

    def gone(self, expert: int) -> None:
        self._evictable.pop(expert, None)

    def victim(self, keep: Container[int]) -> int | None:
        if self._value is None:
            self._value = RECENCY_WEIGHT * self._recent + self.successors.likelihood(self._last)
        value = self._value
        candidates = [e for e in self._evictable if e not in keep]
        return min(candidates, key=value.__getitem__) if candidates else None
