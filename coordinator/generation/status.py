"""What the engine is doing, as a value that anybody may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["EngineState", "EngineStatus"]

EngineState = Literal["loading", "ready", "stuck", "draining", "failed", "stopping"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine is doing.

    Args:
        state: "loading", "ready", "stuck" (one step does not end), "draining" (finishes what it has, takes nothing
            new), "failed" (loading, or the loop again and again, did not work) or "stopping".
        phase: in words, what loading is at, or why it is not ready.
        running: requests on the model now.
        cancelling: of these, the ones that were told to end.
        decoding, prefilling: of these, the ones in the batch and the ones whose prompt is not done.
        queued: requests that wait.
        set_back: of these, the ones whose KV made room for others; they go on when there is room again.
        kv_tokens, kv_budget_tokens: places in KV memory that are in use or will be soon, and how many there are.
        restarts: times that the loop began anew after a failure.
        completed, failed, cancelled: requests that ended so, since the start.
    """

    state: EngineState
    phase: str
    running: int = 0
    cancelling: int = 0
    decoding: int = 0
    prefilling: int = 0
    set_back: int = 0
    queued: int = 0
    kv_tokens: int = 0
    kv_budget_tokens: int = 0
    restarts: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
