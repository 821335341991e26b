"""The engine's state as samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from titan.common.metrics import Sample
from titan.coordinator.generation import Engine, EngineState

__all__ = ["engine_samples"]


def engine_samples(engine: Engine) -> Iterator[Sample]:
    status = engine.status()
    for state in get_args(EngineState):
        value = float(status.state == state)
        yield Sample("titan_engine_state", "gauge", "1 for the state that the engine is in.", value, {"state": state})
    yield Sample("titan_requests_running", "gauge", "Requests on the model.", status.running)
    yield Sample("titan_requests_queued", "gauge", "Requests that wait.", status.queued)
    yield Sample("titan_sequences_decoding", "gauge", "Sequences in the batch.", status.decoding)
    yield Sample("titan_sequences_prefilling", "gauge", "Sequences whose prompt is not done.", status.prefilling)
    yield Sample("titan_sequences_waiting_for_memory", "gauge", "Sequences that made room.", status.set_back)
    yield Sample("titan_kv_used_tokens", "gauge", "Places in KV memory that are in use.", status.kv_tokens)
    yield Sample("titan_kv_budget_tokens", "gauge", "Places in KV memory.", status.kv_budget_tokens)
    yield Sample("titan_engine_restarts", "counter", "Times the engine's loop began anew.", status.restarts)
