"""The prefetcher: at every layer it asks predictors about layers ahead and reads what pays, or stays silent.

Predictors are scored in the shadow on some of the steps in which it is awake; `Worth` says when it is.
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
from titan.common.prefetch.budget import Costs
from titan.common.prefetch.choosing import MAX_PREFETCH, Choice, choose_hint, choose_reads
from titan.common.prefetch.measures import Measures
from titan.common.prefetch.step_clock import StepClock
from titan.common.prefetch.worth import Worth

__all__ = ["Prefetcher"]

MAX_ROWS = 8  # a step of more rows is a prompt: it needs every expert anyway
SHADOW_EVERY = 8  # steps
CHOOSE_EVERY = 8  # steps
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
        self.worth = Worth()
        self.choices: list[Choice | None] = [None] * len(layers)
        self.hints: list[Choice | None] = [None] * len(layers)  # the same for what workers are told
        self.scores = [[PredictionScore(2 * MAX_PREFETCH) for _ in predictors] for _ in layers]
        self.steps = 0
        self._layers = list(layers)
        self._times = StepClock(self._layers, self.measures, clock)
        self._looked = 0  # steps
        self._first, self._final = _ends(layers)
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
        if forced is not None and predictors:
            self.choices = [Choice(predictors[0], forced, 0.0) for _ in layers]
            self.hints = list(self.choices)

    def lookout(self, index: int, x: mx.array) -> list[mx.array]:
        """Arrays to evaluate together with a layer's indices; x: [N, D]. Call `routed` afterwards."""
        self._probes, self._own, self._hidden = {}, None, None
        position = self._positions[index]
        if position == self._first:
            self._times.enter()
        if x.shape[0] > MAX_ROWS or not self._looking:
            return []
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
            self._times.pause()
            return
        position = self._positions[index]
        if self._looking:
            self._observe(position, experts)
        elif self.worth.phase != "asleep":
            self._times.reached(position)
            self._times.leave(0)
        if position == self._final:
            self._end_step(experts.shape[0])

    def _observe(self, position: int, experts: np.ndarray) -> None:
        self._times.reached(position)
        chosen: list[int] = list(dict.fromkeys(experts.reshape(-1).tolist()))
        self._score(position, chosen)
        own, hidden = (None if array is None else np.array(array) for array in (self._own, self._hidden))
        probes = {depth: np.array(logits) for depth, logits in self._probes.items()}
        for predictor in self.predictors:
            predictor.observe(position, Routing(chosen, own, probes.get(predictor.depth), hidden, experts))
        begun = 0
        for depth in {p.depth for p in self.predictors}:
            begun += self._look_ahead((position + depth) % len(self._layers), depth)
        self._times.leave(begun)

    def _end_step(self, rows: int) -> None:
        self.steps += 1
        self._looked += self._looking
        took = self._times.step()
        if self._forced is not None or took is None:
            return
        if self.worth.phase != "asleep" and self.steps % CHOOSE_EVERY == 0:
            self._choose()
        looking = self.worth.looking
        promising = any(choice is not None for choice in (*self.choices, *self.hints))
        self.worth.ended(took[0], took[0] if self._workers_read else took[1], rows, promising=promising)
        if self.worth.looking != looking:
            self._times.pause()
            self._guesses = [[] for _ in self._layers]
        if self.worth.phase == "asleep":
            self.choices = [None] * len(self._layers)
            self.hints = [None] * len(self._layers)

    def replace(self, position: int, layer: ExpertLayer) -> None:
        """A layer has other slots from now on; nothing is under way to the old ones. What was learned stays."""
        self._layers[position] = layer
        self._first, self._final = _ends(self._layers)
        self._guesses[position] = []
        self._times.pause()

    @property
    def _looking(self) -> bool:
        return self._forced is not None or self.worth.looking

    @property
    def _shadow(self) -> bool:
        return (self._forced is None and self.worth.phase == "learning") or self._looked % SHADOW_EVERY == 0

    @property
    def _workers_read(self) -> bool:
        """Workers read experts, so that there may be a stall that is not seen here."""
        remote = self._remote
        return remote is not None and any(
            remote.fetch_s(layer.buffers.layer.index) is not None for layer in self._layers
        )

    def _uses(self, position: int, predictor: Predictor) -> bool:
        chosen = (self.choices[position], self.hints[position])
        return any(choice is not None and choice.predictor is predictor for choice in chosen)

    def _score(self, position: int, chosen: list[int]) -> None:
        if not self._guesses[position]:
            return
        wanted = set(chosen)
        would_miss = wanted - self._resident[position]
        for guess in self._guesses[position]:
            self.scores[position][guess.predictor].add(guess.ranked, guess.absent, wanted, would_miss)
        self._guesses[position] = []

    def _look_ahead(self, ahead: int, depth: int) -> int:
        """Score and read for a layer to come; returns how many reads began."""
        layer = self._layers[ahead]
        index = layer.buffers.layer.index
        choice, hint = self.choices[ahead], self.hints[ahead]
        silent = self.worth.phase == "learning" and self._forced is None
        choice = None if silent or choice is None or choice.predictor.depth != depth else choice
        hint = None if silent or hint is None or hint.predictor.depth != depth or self._remote is None else hint
        if layer.incoming is None or layer.whole or not (self._shadow or choice or hint):
            return 0
        count = 0
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
                    count += len(begun)
        return count

    def _choose(self) -> None:
        """Per layer the predictor and the m that gain most by (9); none where nothing gains."""
        now = self.measures
        here = Costs(now.fetch_s, now.layer_s, now.useless_s, now.readers, now.saved_s)
        for position, (layer, scores) in enumerate(zip(self._layers, self.scores, strict=True)):
            self.choices[position] = choose_reads(self.predictors, scores, here)
            there_s = None if self._remote is None else self._remote.fetch_s(layer.buffers.layer.index)
            if there_s is None:
                self.hints[position] = None
            else:  # a useless read holds one of their readers while a demand may wait
                there = Costs(there_s, now.layer_s, there_s / now.readers, now.readers, there_s)
                self.hints[position] = choose_hint(self.predictors, scores, there)
            for score in scores:
                score.decay(MEMORY)


def _ends(layers: Sequence[ExpertLayer]) -> tuple[int, int]:
    """Positions of the first and the last layer that are seen here; one that is wholly at home never asks."""
    asking = [i for i, layer in enumerate(layers) if not layer.whole]
    return (asking[0], asking[-1]) if asking else (-1, -1)
