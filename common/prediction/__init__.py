"""Predictors of the router's next choices: pure, so that a replayed trace sees what serving saw."""

from titan.common.prediction.base import Predictor, Routing
from titan.common.prediction.oracle import Oracle
from titan.common.prediction.previous import PreviousToken
from titan.common.prediction.probe import Probe
from titan.common.prediction.score import PredictionScore
from titan.common.prediction.transition import Transition

__all__ = ["Oracle", "PredictionScore", "Predictor", "PreviousToken", "Probe", "Routing", "Transition"]
