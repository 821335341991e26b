"""What went to and came from one worker, and where the time of its answers went: numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from titan.common.wire.messages import ExecuteCall, ExecuteResult

__all__ = ["Traffic"]


@dataclass(slots=True)
class Traffic:
    """Since the start, of calls that were answered.

    Args:
        sent_bytes, received_bytes: activations and pairs; outputs. Headers and TLS not counted.
        wire_s: from sending to the answer, without the worker's own times; an answer that lay there while this thread
            was busy counts as on the wire.
        queue_s, compute_s, load_s: as the worker reports them.
    """

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    wire_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    load_s: float = 0.0

    def count(self, call: ExecuteCall, result: ExecuteResult, took_s: float) -> float:
        """Count an answer that took so long; returns the seconds it was on the wire."""
        self.calls += 1
        self.sent_bytes += call.activations.nbytes + call.pair_rows.nbytes + call.pair_experts.nbytes
        self.received_bytes += result.outputs.nbytes
        self.queue_s += result.queue_us * 1e-6
        self.compute_s += result.compute_us * 1e-6
        self.load_s += result.load_us * 1e-6
        wire_s = max(took_s - (result.queue_us + result.compute_us + result.load_us) * 1e-6, 0.0)
        self.wire_s += wire_s
        return wire_s
