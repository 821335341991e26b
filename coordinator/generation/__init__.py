"""From a prompt's token ids to text: the engine that owns MLX, and the values that go in and come out."""

from titan.coordinator.generation.engine import DEFAULT_MAX_SEQUENCES, DEFAULT_QUEUE_LIMIT, Engine
from titan.coordinator.generation.events import Event, Finished, FinishReason, TextDelta, Timings, TokenLogprob, Usage
from titan.coordinator.generation.handle import Handle
from titan.coordinator.generation.model import LoadedModel, ServedModel
from titan.coordinator.generation.observer import Observer
from titan.coordinator.generation.request import GenerationRequest, Sampling, fit_max_tokens
from titan.coordinator.generation.status import EngineState, EngineStatus

__all__ = [
    "DEFAULT_MAX_SEQUENCES",
    "DEFAULT_QUEUE_LIMIT",
    "Engine",
    "EngineState",
    "EngineStatus",
    "Event",
    "FinishReason",
    "Finished",
    "GenerationRequest",
    "Handle",
    "LoadedModel",
    "Observer",
    "Sampling",
    "ServedModel",
    "TextDelta",
    "Timings",
    "TokenLogprob",
    "Usage",
    "fit_max_tokens",
]
