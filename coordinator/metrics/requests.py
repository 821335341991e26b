"""Histograms and counters of requests and steps, filled by the engine as they happen. Knows no HTTP."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from titan.coordinator.generation.events import Timings, Usage
from titan.coordinator.generation.observer import Outcome

__all__ = ["RequestMetrics"]

_STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BATCH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 32)


class RequestMetrics:
    """The engine's observer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("titan_requests", "Requests that are over.", ["outcome"], registry=registry)
        self._prompt = Counter("titan_prompt_tokens", "Prompt tokens of requests that are over.", registry=registry)
        self._cached = Counter(
            "titan_prompt_cached_tokens", "Prompt tokens whose KV was known and not run again.", registry=registry
        )
        self._run = Counter("titan_prefill_tokens", "Prompt tokens that were run.", registry=registry)
        self._generated = Counter("titan_generated_tokens", "Tokens that were generated.", registry=registry)
        self._set_back = Counter(
            "titan_sequences_set_back", "Sequences whose KV made room for others.", registry=registry
        )
        self._first = Histogram(
            "titan_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self._next = Histogram(
            "titan_time_between_tokens_seconds",
            "Between two tokens of a request.",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self._queue = Histogram(
            "titan_queue_time_seconds",
            "From a request's arrival to its admission.",
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self._step = Histogram(
            "titan_decode_step_seconds", "One decode step of the batch.", buckets=_STEP_BUCKETS_S, registry=registry
        )
        self._chunk = Histogram(
            "titan_prefill_chunk_seconds", "One chunk of a prompt.", buckets=_WAIT_BUCKETS_S, registry=registry
        )
        self._rows = Histogram(
            "titan_batch_sequences", "Sequences of a decode step.", buckets=_BATCH_BUCKETS, registry=registry
        )

    def stepped(self, rows: int, seconds: float) -> None:
        self._step.observe(seconds)
        self._rows.observe(rows)
        self._generated.inc(rows)

    def prefilled(self, tokens: int, seconds: float) -> None:
        self._chunk.observe(seconds)
        self._run.inc(tokens)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._next.observe(seconds)

    def set_back(self) -> None:
        self._set_back.inc()

    def finished(self, outcome: Outcome, usage: Usage, timings: Timings) -> None:
        self._requests.labels(outcome).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._queue.observe(max(timings.queue_s, 0.0))
