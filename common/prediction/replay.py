"""A recorded trace through slot tables, policies and a predictor, as serving would have gone: hits, r, q, r'.

Pure: the same tables, policies and predictors that serve, no memory behind them and no clock. A prefetch is taken to
arrive in time; what it costs when it does not is the formulation's (8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.common.prediction.base import Predictor, Routing
from titan.common.prediction.score import PredictionScore
from titan.common.slots import EvictionPolicy, SlotTable

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, slots=True)
class Replay:
    """Hit rate with prefetch, misses a step over all layers, and the predictor's score."""

    hit_rate: float
    misses_per_step: float
    loads_per_step: float
    score: PredictionScore


def replay(
    ids: NDArray[np.integer],
    capacity: int,
    policies: Sequence[EvictionPolicy],
    predictor: Predictor | None = None,
    *,
    prefetch: int = 0,
    ranks: int = 16,
    probabilities: NDArray[np.floating] | None = None,
    probes: NDArray[np.floating] | None = None,
    warm: int = 0,
) -> Replay:
    """Replay a trace.

    Args:
        ids: [tokens, layers, K] chosen experts.
        capacity: C, at least K.
        policies: one fresh policy a layer.
        prefetch: most absent experts brought in a layer (m).
        probabilities, probes: [tokens, layers, E] for predictors that need them.
        warm: tokens at the start that are not counted.
    """
    tokens, layers, _ = ids.shape
    tables = [SlotTable(capacity, policy) for policy in policies]
    score = PredictionScore(ranks)
    guesses: list[tuple[list[int], list[int]]] = [([], []) for _ in range(layers)]
    hits = misses = loads = 0
    for token in range(tokens):
        for layer in range(layers):
            chosen: list[int] = ids[token, layer].tolist()
            table = tables[layer]
            predicted, absent = guesses[layer]
            if predicted and token >= warm:
                brought = set(absent)
                would_miss = [e for e in chosen if e not in table.slots or e in brought]
                score.add(predicted, absent, chosen, would_miss)
            missing = table.look_up(chosen)
            _bring(table, missing, chosen)
            if token >= warm:
                misses += len(missing)
                hits += len(chosen) - len(missing)
            if predictor is None:
                continue
            probability = None if probabilities is None else probabilities[token, layer]
            probe = None if probes is None else probes[token, layer]
            predictor.observe(layer, Routing(chosen, probability, probe))
            ahead = (layer + predictor.depth) % layers
            ranked: list[int] = predictor.rank(ahead)[:ranks].tolist()
            away = [e for e in ranked if e not in tables[ahead].slots]
            guesses[ahead] = (ranked, away)
            if prefetch:
                _bring(tables[ahead], away[:prefetch], ranked, prefetched=True)
    counted = max(1, tokens - warm)
    loads = sum(table.counts.loads for table in tables)
    return Replay(hits / max(1, hits + misses), misses / counted, loads / tokens, score)


def _bring(table: SlotTable, experts: Sequence[int], keep: Sequence[int], *, prefetched: bool = False) -> None:
    for expert in experts:
        if table.reserve([expert], keep) is not None:
            table.map(expert, prefetched=prefetched)
