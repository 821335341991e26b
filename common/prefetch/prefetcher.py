"""The prefetcher: at every layer it asks predictors about layers ahead and reads what pays, or stays silent.

Predictors are scored in the shadow on some of the steps, whether or not anything is read, so that silence can end.
Belongs to the thread that owns MLX. Changes which experts are in memory early, never which are executed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from titan.common.experts import ExpertLayer
from titan.common.prediction import PredictionScore, Predictor, Routing
from titan.common.prefetch.budget import Costs, prefetch_gain
from titan.common.prefetch.measures import Measures

__all__ = ["Choice", "Prefetcher"]

MAX_PREFETCH = 8  # experts a layer (m)
MAX_ROWS = 8  # a step of more rows is a prompt: it needs every expert anyway
SHADOW_EVERY = 8  # steps
LEARNING_STEPS = 64  # at first every step is scored
CHOOSE_EVERY = 16  # steps, and at the fourth and the eighth
REST_EVERY, REST_STEPS = 64, 6
MEMORY = 0.9  # of the scores, each time a choice is made

Router = Callable[[mx.array], mx.array]


class Remote(Protocol):
    """Workers that execute experts, some of which they read from their own disks. Layers by the model's numbers."""

    def elsewhere(self, layer: int) -> Collection[int]:
        """Experts that workers execute: reading them here would be for nothing."""
        ...

    def fetch_s(self, layer: int) -> float | None:
        """Seconds that a read of one of the layer's experts takes there (lambda); None where nothing is read."""
        ...

    def hint(self, layer: int, ranked: Sequence[int], reads: int) -> None:
        """Say what the layer will probably ask for, likeliest first, and that the first `reads` are worth reading."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done for one layer: read the first m absent experts that a predictor names; seconds it should gain."""

    predictor: Predictor
    m: int
    gain_s: float


@dataclass(slots=True)
class _Guess:
    predictor: int
    ranked: list[int]
    absent: list[int]


class Prefetcher:
    """Prefetch over the MoE layers of one model.

    Args:
        layers: in the order they run.
        predictors: candidates; each layer uses the one that gains most, if any gains.
        readers: width of the pool that the layers read with (w).
        routers: layer position -> its router, for predictors that probe; hidden states [N, D] -> logits [N, E].
        forced: read this many whatever the condition says (to measure what it is worth).
        remote: told what workers will be asked for, where that pays.
        clock: seconds.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        predictors: Sequence[Predictor],
        readers: int,
        *,
        routers: Mapping[int, Router] | None = None,
        forced: int | None = None,
        remote: Remote | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.measures = Measures(readers)
        self.choices: list[Choice | None] = [None] * len(layers)
        self.hints: list[Choice | None] = [None] * len(layers)  # the same for what workers are told
        self.scores = [[PredictionScore(2 * MAX_PREFETCH) for _ in predictors] for _ in layers]
        self.steps = 0
        self._layers = list(layers)
        self._final = _last_that_asks(layers)
        self._positions = {layer.buffers.layer.index: i for i, layer in enumerate(layers)}
        self.predictors = predictors
        self._routers = routers or {}
        self._forced = forced
        self._remote = remote
        self._clock = clock
        self._guesses: list[list[_Guess]] = [[] for _ in layers]
        self._resident: list[frozenset[int]] = [frozenset()] * len(layers)
        self._probes: dict[int, mx.array] = {}
        self._own: mx.array | None = None
        self._hidden: mx.array | None = None
        self._last: float | None = None
        self._flying = 0  # prefetches under way since the layer before
        self._stalled = [(0.0, 0.0, 0)] * len(layers)
        if forced is not None and predictors:
            self.choices = [Choice(predictors[0], forced, 0.0) for _ in layers]
            self.hints = list(self.choices)

    def lookout(self, index: int, x: mx.array) -> list[mx.array]:
        """Arrays to evaluate together with a layer's indices; x: [N, D]. Call `routed` afterwards."""
        self._probes, self._own, self._hidden = {}, None, None
        if x.shape[0] > MAX_ROWS:
            return []
        position = self._positions[index]
        for predictor in self.predictors:
            ahead = (position + predictor.depth) % len(self._layers)
            if not (self._shadow or self._uses(ahead, predictor)):
                continue
            if predictor.needs_probe and predictor.depth not in self._probes and ahead in self._routers:
                self._probes[predictor.depth] = self._routers[ahead](x).astype(mx.float32).sum(axis=0)
            if predictor.needs_probabilities and self._own is None and position in self._routers:
                self._own = mx.softmax(self._routers[position](x).astype(mx.float32), axis=-1).sum(axis=0)
            if predictor.needs_hidden and self._hidden is None:
                self._hidden = x.astype(mx.float32)
        return [*self._probes.values(), *(array for array in (self._own, self._hidden) if array is not None)]

    def routed(self, index: int, experts: np.ndarray) -> None:
        """A layer has routed [N, K] and what it needed is in memory: learn from it, read ahead."""
        if experts.shape[0] > MAX_ROWS:
            self._last = None
            return
        position = self._positions[index]
        chosen: list[int] = list(dict.fromkeys(experts.reshape(-1).tolist()))
        self._measure(position)
        self._score(position, chosen)
        own, hidden = (None if array is None else np.array(array) for array in (self._own, self._hidden))
        probes = {depth: np.array(logits) for depth, logits in self._probes.items()}
        for predictor in self.predictors:
            predictor.observe(position, Routing(chosen, own, probes.get(predictor.depth), hidden, experts))
        for depth in {p.depth for p in self.predictors}:
            self._look_ahead((position + depth) % len(self._layers), depth)
        if position == self._final:
            self.steps += 1
            if self._forced is None and (self.steps % CHOOSE_EVERY == 0 or self.steps in (4, 8)):
                self._choose()
        self._flying = sum(len(layer.incoming) for layer in self._layers if layer.incoming is not None)
        self._last = self._clock()

    def replace(self, position: int, layer: ExpertLayer) -> None:
        """A layer has other slots from now on; nothing is under way to the old ones. What was learned stays."""
        self._layers[position] = layer
        self._final = _last_that_asks(self._layers)
        self._guesses[position] = []
        self._last = None

    @property
    def _resting(self) -> bool:
        """A few steps without prefetch now and then: tau and lambda undisturbed, which kappa is measured against."""
        return self._forced is None and self.steps % REST_EVERY >= REST_EVERY - REST_STEPS

    @property
    def _shadow(self) -> bool:
        return self.steps < LEARNING_STEPS or self.steps % SHADOW_EVERY == 0

    def _uses(self, position: int, predictor: Predictor) -> bool:
        chosen = (self.choices[position], self.hints[position])
        return any(choice is not None and choice.predictor is predictor for choice in chosen)

    def _measure(self, position: int) -> None:
        counts = self._layers[position].table.counts
        stall, late, misses = counts.stall_s, counts.late_s, counts.misses
        before = self._stalled[position]
        self._stalled[position] = (stall, late, misses)
        flying = self._flying
        waited = (stall - before[0]) - (late - before[1])
        if misses > before[2] and waited > 0:
            self.measures.add_demand(waited, misses - before[2], flying)
        if self._last is not None:
            took = self._clock() - self._last - (stall - before[0])
            if took > 0:
                self.measures.add_layer(took, flying)

    def _score(self, position: int, chosen: list[int]) -> None:
        if not self._guesses[position]:
            return
        wanted = set(chosen)
        would_miss = wanted - self._resident[position]
        for guess in self._guesses[position]:
            self.scores[position][guess.predictor].add(guess.ranked, guess.absent, wanted, would_miss)
        self._guesses[position] = []

    def _look_ahead(self, ahead: int, depth: int) -> None:
        layer = self._layers[ahead]
        index = layer.buffers.layer.index
        choice, hint = self.choices[ahead], self.hints[ahead]
        choice = None if choice is None or choice.predictor.depth != depth or self._resting else choice
        hint = None if hint is None or hint.predictor.depth != depth or self._remote is None else hint
        if layer.incoming is None or layer.whole or not (self._shadow or choice or hint):
            return
        if not self._guesses[ahead]:
            elsewhere = self._remote.elsewhere(index) if self._remote is not None else ()
            self._resident[ahead] = frozenset(layer.table.slots).union(elsewhere)
        top = 2 * MAX_PREFETCH
        for number, predictor in enumerate(self.predictors):
            mine = choice is not None and predictor is choice.predictor
            theirs = hint is not None and predictor is hint.predictor
            if predictor.depth != depth or not (self._shadow or mine or theirs):
                continue
            ranked: list[int] = predictor.rank(ahead)[:top].tolist()
            absent = [e for e in ranked if e not in self._resident[ahead]]
            self._guesses[ahead].append(_Guess(number, ranked, absent))
            if theirs and hint is not None and self._remote is not None:
                self._remote.hint(index, ranked, hint.m)
            if mine and choice is not None and choice.m > 0:
                start = self._clock()
                begun = layer.incoming.begin(absent[: choice.m], keep=frozenset(ranked))
                if begun:
                    self.measures.submit.add((self._clock() - start) / len(begun))

    def _choose(self) -> None:
        """Per layer the predictor and the m that gain most by (9); none where nothing gains."""
        measures = self.measures
        costs = Costs(measures.fetch_s, measures.layer_s, measures.useless_s, measures.readers)
        for position, scores in enumerate(self.scores):
            best: Choice | None = None
            for predictor, score in zip(self.predictors, scores, strict=True):
                m, gain = prefetch_gain(score.chances()[:MAX_PREFETCH].tolist(), predictor.depth, costs)
                if m and (best is None or gain > best.gain_s):
                    best = Choice(predictor, m, gain)
            self.choices[position] = best
            self.hints[position] = self._choose_hint(position)
            for score in scores:
                score.decay(MEMORY)

    def _choose_hint(self, position: int) -> Choice | None:
        """The same for a layer that workers read experts of.

        Which experts they have is not known here, so a rank counts with its chance of being chosen at all. A useless
        read holds one of their readers while a demand may wait: kappa = lambda / w.
        """
        measures = self.measures
        fetch_s = self._remote.fetch_s(self._layers[position].buffers.layer.index) if self._remote is not None else None
        if fetch_s is None:
            return None
        costs = Costs(fetch_s, measures.layer_s, fetch_s / measures.readers, measures.readers)
        best: Choice | None = None
        for predictor, score in zip(self.predictors, self.scores[position], strict=True):
            m, gain = prefetch_gain(score.shares()[:MAX_PREFETCH].tolist(), predictor.depth, costs)
            if m and (best is None or gain > best.gain_s):
                best = Choice(predictor, m, gain)
        return best


def _last_that_asks(layers: Sequence[ExpertLayer]) -> int:
    """Position of the last layer that is seen here; one that is wholly at home never asks."""
    return max((i for i, layer in enumerate(layers) if not layer.whole), default=-1)
