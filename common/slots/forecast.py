"""The policy that looks ahead: whoever the router is least likely to choose soon goes first.

What is soon is learned online, from the router's own choices, in this layer and in those before it. Knows experts and
the order in which they were chosen, no slots and no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from copy import copy

import numpy as np

LAGS = 7  # layers before whose choices are evidence
DECAYS = (0.8, 0.98)  # of the two traces of earlier choices: the sentence, the topic
HORIZON = 9  # tokens that "soon" means
DISCOUNT = 0.6  # a use k tokens ahead counts 0.6^(k - 1)
RATE = 0.03
SQUARE_START = 0.01
LARGEST_LOGIT = 30.0


class Choices:
    """The latest choice of every layer of one model: what a layer may know of those that ran just before it."""

    def __init__(self, layers: int = 1) -> None:
        self.last: list[tuple[int, ...]] = [()] * layers

    def before(self, position: int) -> list[tuple[int, ...]]:
        """Choices of the LAGS layers before, nearest first; before the first layer come the token before's last."""
        lags = min(LAGS, len(self.last) - 1)
        return [self.last[position - lag] for lag in range(1, lags + 1)]


class Foresight:
    """Online logistic regression of which experts come soon.

    sigma(z_j) is to be y_j = sum_k 0.6^(k - 1) [j in S_{t+k}] / sum_k 0.6^(k - 1) over the HORIZON tokens after t, with
    z = b + W f and f: the experts chosen now, those of the LAGS layers before, two fading traces of this layer's
    choices. Trained on each token once what came after it is known (AdaGrad, one rate a feature).

    `weights`: [1 + (1 + LAGS + 2) E, E]; `squares`: [1 + (1 + LAGS + 2) E]; `steps`: tokens learned from.
    """

    def __init__(self, num_experts: int) -> None:
        features = 1 + (1 + LAGS + len(DECAYS)) * num_experts
        self.weights = np.zeros((features, num_experts), np.float32)
        self.squares = np.full(features, SQUARE_START, np.float32)
        self.steps = np.zeros(1, np.float64)
        self._experts = num_experts
        self._dense = features - len(DECAYS) * num_experts
        self._traces = np.zeros((len(DECAYS), num_experts), np.float32)
        self._decays = np.array(DECAYS, np.float32)[:, None]
        self._gains = 1 - self._decays
        weights = DISCOUNT ** np.arange(HORIZON)
        self._shares = (weights / weights.sum()).astype(np.float32)
        self._past: deque[tuple[list[int], np.ndarray]] = deque()
        self._chosen: deque[list[int]] = deque()

    def observe(self, experts: Sequence[int], before: Sequence[Sequence[int]]) -> None:
        """One token's choice, and those of the layers before."""
        chosen, width = list(experts), self._experts
        active = [0, *(1 + e for e in chosen)]
        for lag, choice in enumerate(before, start=1):
            active += [1 + lag * width + e for e in choice]
        self._traces *= self._decays
        self._traces[:, chosen] += self._gains
        if len(self._past) == HORIZON:  # what came after the oldest is known with this choice
            self._chosen.append(chosen)
            self._learn(*self._past.popleft())
            self._chosen.popleft()
        elif self._past:
            self._chosen.append(chosen)
        self._past.append((active, self._traces.ravel().copy()))
        self.steps += 1

    def forget_context(self) -> None:
        """What comes next does not follow what came last."""
        self._past.clear()
        self._chosen.clear()

    def logits(self) -> np.ndarray:
        """[E] z after the last choice; the bias alone before the first."""
        return self._logits(*self._past[-1]) if self._past else self.weights[0]

    def _logits(self, active: list[int], traces: np.ndarray) -> np.ndarray:
        return self.weights[active].sum(axis=0) + traces @ self.weights[self._dense :]

    def _learn(self, active: list[int], traces: np.ndarray) -> None:
        error = 1 / (1 + np.exp(-np.clip(self._logits(active, traces), -LARGEST_LOGIT, LARGEST_LOGIT)))
        for share, chosen in zip(self._shares, self._chosen, strict=True):
            error[chosen] -= share
        square = float(error @ error) / self._experts
        squares, dense = self.squares, self._dense
        squares[active] += square
        squares[dense:] += square * traces * traces
        self.weights[active] -= (RATE / np.sqrt(squares[active]))[:, None] * error
        self.weights[dense:] -= (RATE * traces / np.sqrt(squares[dense:]))[:, None] * error


class Forecast:
    """Evicts the expert that is least likely to come soon.

    Args:
        num_experts: E.
        largest_choice: choices of more experts than this (a prompt's many rows) teach nothing about the next token.
        choices, position: shared by the policies of all layers, so that each knows what those before it chose.
    """

    def __init__(
        self,
        num_experts: int,
        largest_choice: int | None = None,
        *,
        choices: Choices | None = None,
        position: int = 0,
    ) -> None:
        self.foresight = Foresight(num_experts)
        self._largest = largest_choice or max(1, num_experts // 2)
        self._choices, self._position = choices or Choices(), position
        self._value: list[float] | None = None
        self._evictable: dict[int, None] = {}

    def selected(self, experts: Sequence[int]) -> None:
        self._value = None
        if len(experts) > self._largest:
            self._choices.last[self._position] = ()
            self.foresight.forget_context()
            return
        self.foresight.observe(experts, self._choices.before(self._position))
        self._choices.last[self._position] = tuple(experts)

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
            self._value = value = self.foresight.logits().tolist()
        candidates = [e for e in self._evictable if e not in keep]
        return min(candidates, key=value.__getitem__) if candidates else None
