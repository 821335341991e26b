"""From a prompt's token ids to text: the engine that owns MLX, and the values that go in and come out."""

from titan.coordinator.generation.engine import DEFAULT_QUEUE_LIMIT, Engine, EngineState, EngineStatus
from titan.coordinator.generation.events import Event, Finished, FinishReason, TextDelta, Timings, TokenLogprob, Usage
from titan.coordinator.generation.handle import Handle
from titan.coordinator.generation.model import LoadedModel, ServedModel
from titan.coordinator.generation.request import GenerationRequest, Sampling, fit_max_tokens

__all__ = [
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
    "Sampling",
    "ServedModel",
    "TextDelta",
    "Timings",
    "TokenLogprob",
    "Usage",
    "fit_max_tokens",
]
