"""Where a layer's time goes: attention, local compute, wire, wait, stall; measured in one forward pass of many.

MLX is lazy: outside a measured pass, the time between two layers' hooks holds attention and whatever the hook before
left unevaluated, and nobody can tell them apart. In a measured pass each layer is evaluated when its experts are
reached and again when they are done, so its parts are exact and add up to the wall clock; that costs one
synchronisation more a layer, once in EVERY passes. All other passes pay one look at a flag a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from titan.common.experts import ExpertLayer
from titan.coordinator.moe.account import Executed
from titan.coordinator.remote.exchange import Exchange

__all__ = ["PARTS", "LayerParts", "LayerTimes"]

PARTS = ("attention", "local", "wire", "wait", "stall")
EVERY = 128  # passes
FIRST = 16  # the pass that is measured first: those before warm up
MAX_ROWS = 64  # a pass with more rows is a prompt's


@dataclass(slots=True)
class LayerParts:
    """One layer's seconds over the measured passes. What overlaps counts once, as waiting.

    Args:
        attention: from the end of the experts before to the router's choice: combination, attention, norms, router.
        local: experts here, and choosing who executes what.
        wire: of the last answer of the layer, what neither the worker's queue nor its work took.
        wait: for answers, beyond that.
        stall: for reads of experts (sigma).
    """

    passes: int = 0
    attention: float = 0.0
    local: float = 0.0
    wire: float = 0.0
    wait: float = 0.0
    stall: float = 0.0


@dataclass(slots=True)
class LayerTimes:
    """Written by the engine's thread; any thread may read.

    Args:
        executed: of the dispatcher; tells how long it waited for workers.
        exchange: tells how long the last answer was on its way.
        clock: seconds.
    """

    executed: Executed
    exchange: Exchange
    clock: Callable[[], float] = time.perf_counter
    layers: dict[int, LayerParts] = field(default_factory=dict)
    measuring: bool = False
    _passes: int = 0
    _left: float = 0.0

    def begin(self, rows: int) -> None:
        """A forward pass of so many rows begins."""
        self.measuring = False
        if rows > MAX_ROWS:
            return
        self._passes += 1
        if self._passes % EVERY == FIRST:
            mx.synchronize()  # the pass before may still be computed
            self.measuring = True
            self._left = self.clock()

    def measure(
        self, layer: int, local: ExpertLayer, x: mx.array, indices: mx.array, run: Callable[[], mx.array]
    ) -> mx.array:
        """`run()`, the layer's experts, evaluated, with its time and that since the layer before taken apart."""
        mx.eval(x, indices)
        reached = self.clock()
        stalled, waited = local.table.counts.stall_s, self.executed.wait_s
        y = run()
        mx.eval(y)
        left = self.clock()
        stall = local.table.counts.stall_s - stalled
        wait = self.executed.wait_s - waited
        wire = min(wait, self.exchange.last_wire_s) if wait else 0.0
        parts = self.layers.setdefault(layer, LayerParts())
        parts.passes += 1
        parts.attention += reached - self._left
        parts.stall += stall
        parts.wire += wire
        parts.wait += wait - wire
        parts.local += max(left - reached - stall - wait, 0.0)
        self._left = left
        return y
