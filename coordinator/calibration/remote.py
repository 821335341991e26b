"""A worker's figures as node 0 sees them over one address: what a layer costs that asks it, and what bytes cost.

Layers are measured inside decode steps, through the dispatcher and the transport that will be used, with experts the
worker holds: serialising, wire, queue, computing and joining are all in them. On the thread that owns MLX.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.experts import ExpertLayer
from titan.common.registry import ModelShape
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.coordinator.calibration.steps import DecodeSteps
from titan.coordinator.calibration.timing import Measured, summarise
from titan.coordinator.moe.dispatch import Dispatcher
from titan.coordinator.moe.hook import Executor
from titan.coordinator.moe.workers import Worker
from titan.coordinator.remote.exchange import Exchange, Outstanding
from titan.coordinator.remote.reply_times import ReplyTimes

ROWS = (1, 4, 16, 64)
FIRST_ID = 1 << 61  # no request of the engine has such an id
DEADLINE_S = 30.0
LOOKS = 3


@dataclass(frozen=True, slots=True)
class RemoteFigures:
    """A layer that asks the worker, as (pairs, seconds) beyond a layer without experts; (bytes, seconds) on the way.

    Args:
        transport: "lane" or "grpc", which was used.
        wire: there and back, without what the worker says it computed and queued.
    """

    transport: str
    layer: tuple[tuple[int, Measured], ...]
    wire: tuple[tuple[int, Measured], ...]


class Asking:
    """An executor that asks for `experts` of one layer in every layer, whatever the router chose."""

    def __init__(self, dispatcher: Dispatcher, layer: int, experts: Sequence[int]) -> None:
        self._dispatcher, self._layer = dispatcher, layer
        self._chosen = mx.array(np.array(experts, np.uint32))

    def execute(self, layer: int, x: mx.array, indices: mx.array) -> mx.array:  # noqa: ARG002
        """x: [..., D], indices: [..., K] -> [..., K, D]; the outputs of `experts`, repeated up to K."""
        top_k, asked = indices.shape[-1], self._chosen.size
        chosen = indices[..., :1] * 0 + self._chosen  # known when the router has chosen, as in decoding
        y = self._dispatcher.execute(self._layer, x, chosen)
        return mx.concatenate([y] * -(-top_k // asked), axis=-2)[..., :top_k, :]

    def executed_at_home(self, pairs: int) -> None:
        self._dispatcher.executed_at_home(pairs)


def measure_remote(
    steps: DecodeSteps,
    without_s: float,
    worker: Worker,
    layer: int,
    experts: Sequence[int],
    empty: ExpertLayer,
    shape: ModelShape,
    dtype: str,
) -> RemoteFigures | None:
    """Time a worker that holds `experts` of `layer`; None when it failed meanwhile.

    Args:
        without_s: a step whose layers have no experts.
        empty: a table of that layer with nothing in it, so that nothing is executed at home.
    """
    session = worker.ready
    if session is None:
        return None
    dispatcher = Dispatcher({layer: empty}, [worker], shape.hidden_size, dtype, Exchange(), hedging=False)
    points = []
    for pairs in sorted({1, max(1, len(experts) // 2), len(experts)}):
        asking = Asking(dispatcher, layer, experts[:pairs])
        points.append((pairs, a_layer(quickest(steps, asking), without_s, steps.layers)))
    if dispatcher.executed.fallbacks or worker.ready is not session:
        return None
    wire = _wire(worker, layer, experts[0], shape, dtype)
    return None if wire is None else RemoteFigures(session.transport.name, tuple(points), wire)


def measure_together(
    steps: DecodeSteps,
    without_s: float,
    workers: Sequence[Worker],
    layer: int,
    experts: Sequence[int],
    home: ExpertLayer,
    shape: ModelShape,
    dtype: str,
) -> Measured | None:
    """A layer that asks several workers at once while node 0 executes its share; None when one of them failed.

    What this takes beyond the slowest alone is what sharing costs: one thread that serialises and takes in answers
    one after another, and the cores and the memory that processes on one machine share.

    Args:
        experts: of all, each of them held by one.
        home: a table of that layer with node 0's share in it.
    """
    dispatcher = Dispatcher({layer: home}, workers, shape.hidden_size, dtype, Exchange(), hedging=False)
    taken = quickest(steps, Asking(dispatcher, layer, experts))
    return None if dispatcher.executed.fallbacks else a_layer(taken, without_s, steps.layers)


def quickest(steps: DecodeSteps, executor: Executor) -> Measured:
    """Of several looks; disturbances only ever add time."""
    return min((steps.step(executor) for _ in range(LOOKS)), key=lambda m: m.median_s)


def a_layer(step: Measured, without_s: float, layers: int) -> Measured:
    """What one of a step's layers takes beyond one without experts."""
    return Measured(max(0.0, (step.median_s - without_s) / layers), step.spread, step.samples)


def _wire(
    worker: Worker, layer: int, expert: int, shape: ModelShape, dtype: str
) -> tuple[tuple[int, Measured], ...] | None:
    """(bytes there and back, seconds) of 1, 4, 16 and 64 rows for one expert; None when the worker failed."""
    session = worker.ready
    if session is None:
        return None
    exchange, kind = Exchange(FIRST_ID), COMPUTE_DTYPES[dtype][0]
    lost = False

    def sample(rows: int) -> float:
        nonlocal lost
        call = ExecuteCall(
            request_id=exchange.next_id(),
            layer=layer,
            activations=np.zeros((rows, shape.hidden_size), kind),
            pair_rows=np.arange(rows, dtype=np.uint32),
            pair_experts=np.full(rows, expert, np.uint32),
            sort=False,
            deadline_s=DEADLINE_S,
        )
        inside_s = 0.0

        def take(_: Outstanding, result: ExecuteResult) -> None:
            nonlocal inside_s
            inside_s = (result.compute_us + result.queue_us) / 1e6

        started = time.perf_counter()
        exchange.send(session.transport, call, np.arange(rows), ReplyTimes(DEADLINE_S, 0.0))
        lost = bool(exchange.collect(take)) or lost
        return max(0.0, time.perf_counter() - started - inside_s)

    points = []
    for rows in ROWS:
        sample(rows)
        taken = summarise(lambda rows=rows: sample(rows), samples=15, budget_s=0.5)
        if lost:
            return None
        points.append((2 * rows * shape.hidden_size * np.dtype(kind).itemsize, taken))
    return tuple(points)
