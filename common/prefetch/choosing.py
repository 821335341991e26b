"""What to read ahead for one layer: the predictor and the number that gain most by condition (9). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan.common.prediction import PredictionScore, Predictor
from titan.common.prefetch.budget import Costs, prefetch_gain

__all__ = ["MAX_PREFETCH", "Choice", "choose_hint", "choose_reads"]

MAX_PREFETCH = 8  # experts a layer (m)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done for one layer: read the first m absent experts that a predictor names; seconds it should gain."""

    predictor: Predictor
    m: int
    gain_s: float


def choose_reads(predictors: Sequence[Predictor], scores: Sequence[PredictionScore], costs: Costs) -> Choice | None:
    """For a layer that is read here; None when nothing gains."""
    return _best(predictors, [score.chances().tolist() for score in scores], costs)


def choose_hint(predictors: Sequence[Predictor], scores: Sequence[PredictionScore], costs: Costs) -> Choice | None:
    """For a layer that workers read experts of.

    Which experts they have is not known here, so a rank counts with its chance of being chosen at all.
    """
    return _best(predictors, [score.shares().tolist() for score in scores], costs)


def _best(predictors: Sequence[Predictor], chances: Sequence[list[float]], costs: Costs) -> Choice | None:
    best: Choice | None = None
    for predictor, by_rank in zip(predictors, chances, strict=True):
        m, gain = prefetch_gain(by_rank[:MAX_PREFETCH], predictor.depth, costs)
        if m and (best is None or gain > best.gain_s):
            best = Choice(predictor, m, gain)
    return best
