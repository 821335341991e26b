"""A worker's figures as node 0 sees them: seconds a layer asked of it costs, as a line over its (row, expert) pairs.

Measured through the dispatcher and the transport that will be used, with experts the worker holds, so that the figure
contains everything a layer pays: serialising, wire, queue, computing, joining. On the thread that owns MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.experts import ExpertLayer
from titan.common.registry import ModelShape
from titan.coordinator.calibration.timing import Measured, measure
from titan.coordinator.moe.dispatch import Dispatcher
from titan.coordinator.moe.workers import Worker
from titan.coordinator.remote.exchange import Exchange

MANY_ROWS = 32


@dataclass(frozen=True, slots=True)
class RemoteFigures:
    """(pairs, seconds) of one row's requests, and of MANY_ROWS rows with one expert each."""

    one_row: tuple[tuple[int, Measured], ...]
    many_rows: Measured


def measure_remote(
    worker: Worker, layer: int, experts: Sequence[int], empty: ExpertLayer, shape: ModelShape, dtype: str
) -> RemoteFigures | None:
    """Time requests to one worker that holds `experts` of `layer`; None when it failed meanwhile.

    Args:
        empty: a table of that layer with nothing in it, so that nothing is executed at home.
    """
    exchange = Exchange()
    dispatcher = Dispatcher({layer: empty}, [worker], shape.hidden_size, dtype, exchange)
    rng = np.random.default_rng(0)
    kind = COMPUTE_DTYPES[dtype][1]

    def timed(rows: int, a_row: int) -> Measured:
        x = mx.array(rng.standard_normal((rows, shape.hidden_size)).astype(np.float32)).astype(kind)
        chosen = mx.array(np.array([list(experts)[:a_row]] * rows, np.uint32))
        mx.eval(x, chosen)
        return measure(lambda: mx.eval(dispatcher.execute(layer, x, chosen)), samples=25, budget_s=1.0)

    shares = sorted({1, max(1, len(experts) // 2), len(experts)})
    one_row = tuple((k, timed(1, k)) for k in shares)
    many = timed(MANY_ROWS, 1)
    if dispatcher.executed.fallbacks or worker.ready is None:
        return None
    return RemoteFigures(one_row, many)


def measure_together(
    workers: Sequence[Worker],
    layer: int,
    experts: Sequence[Sequence[int]],
    empty: ExpertLayer,
    shape: ModelShape,
    dtype: str,
) -> Measured | None:
    """One row's request to several workers at once, `experts[i]` of `workers[i]`; None when one of them failed.

    What this takes beyond the slowest worker alone is what asking them one after another costs this machine.
    """
    dispatcher = Dispatcher({layer: empty}, workers, shape.hidden_size, dtype, Exchange())
    x = mx.array(np.random.default_rng(0).standard_normal((1, shape.hidden_size)).astype(np.float32))
    x = x.astype(COMPUTE_DTYPES[dtype][1])
    chosen = mx.array(np.array([[e for some in experts for e in some]], np.uint32))
    mx.eval(x, chosen)
    measured = measure(lambda: mx.eval(dispatcher.execute(layer, x, chosen)), samples=25, budget_s=1.0)
    return None if dispatcher.executed.fallbacks else measured
