"""The policy that looks ahead: whoever the router is least likely to choose soon goes first.

It learns, online, how often an expert follows another within the next few tokens of the same layer. Knows experts
and the order in which they were chosen, no slots and no time.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from copy import copy

import numpy as np

DISCOUNT = 0.5  # a use k tokens ahead counts 0.5^(k - 1)
RECENCY = 0.97
RECENCY_WEIGHT = 0.3
EVIDENCE_WEIGHT = 0.5  # the chosen experts are not independent witnesses
PRIOR_USES = 4.0


class Successors:
    """Discounted counts: how often expert j was chosen within the tokens after expert i.

    `counts[i, j]` is the sum of 0.5^(k - 1) over all tokens k after a choice of i at which j was chosen, `uses[i]` the
    number of choices of i: together a learned successor representation of the router in one layer.
    """

    def __init__(self, num_experts: int) -> None:
        self.counts = np.zeros((num_experts, num_experts), np.float32)
        self.uses = np.zeros(num_experts, np.float32)
        self.steps = np.zeros(1, np.float64)
        self._trace = np.zeros(num_experts, np.float32)  # what each earlier choice still counts

    def observe(self, experts: Sequence[int]) -> None:
        """One token's choice."""
        chosen = list(experts)
        self.counts[:, chosen] += self._trace[:, None]
        self.uses[chosen] += 1
        self.steps += 1
        self._trace *= DISCOUNT
        self._trace[chosen] += 1

    def likelihood(self, experts: Sequence[int]) -> np.ndarray:
        """[E]: discounted uses to expect of every expert after `experts` were chosen."""
        base = (self.uses + 0.1) / (float(self.steps[0]) + 1) / (1 - DISCOUNT)
        if not len(experts):
            return base
        chosen = list(experts)
        ratio = self.counts[chosen] / base
        ratio += PRIOR_USES
        ratio /= (self.uses[chosen] + PRIOR_USES)[:, None]
        return base * np.prod(ratio, axis=0) ** EVIDENCE_WEIGHT


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
        self._value: list[float] | None = None
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

    def emptied(self) -> Forecast:
        heir = copy(self)
        heir._evictable = {}
        return heir

    def victim(self, keep: Container[int]) -> int | None:
        value = self._value
        if value is None:
            value = (RECENCY_WEIGHT * self._recent + self.successors.likelihood(self._last)).tolist()
            self._value = value
        candidates = [e for e in self._evictable if e not in keep]
        return min(candidates, key=value.__getitem__) if candidates else None
