"""The cost of one remote layer, taken apart, and decoding over two workers: the lane against gRPC, in one run.

One row through top-k experts that a worker on loopback holds, by the coordinator's own dispatcher. What a part costs is
taken from the clock around it and from the times in the worker's replies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.errors import WorkerUnreachable
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.coordinator.bench.alone import greedy_tokens
from titan.coordinator.bench.placement import on_workers
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.generation.model import LoadedModel
from titan.coordinator.moe.dispatch import Dispatcher
from titan.coordinator.remote.exchange import Exchange, Failed, Hedge, OnFailure, OnResult, Outstanding
from titan.coordinator.remote.lane_transport import LaneTransport
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.transport import Transport

TRANSPORTS = ("lane", "grpc")
PARTS = ("prepare", "serialise", "wire", "queue", "compute", "join")
WARM_UP = 30
PAUSE_S = 300e-6
FIRST_ID = 1 << 61
PROMPT = (11, 12, 13, 14)
PATIENCE = {"timeouts": {"execute": "10s"}}  # a noisy machine shall not fail over in the middle of a measurement


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Medians in microseconds of one layer by one transport.

    Args:
        total_us: of the hook's call. Its result is lazy: joining it is evaluated with what follows.
        parts_us: prepare (synchronise, choose, select rows), serialise (until the kernel has the request), wire (from
            there to the reply, without the worker's own times), queue, compute, join.
        bare_wire_us: a frame of as many bytes there and back; None where the transport has none.
        beyond_us: total without compute and without the bare wire.
    """

    transport: str
    total_us: float
    parts_us: dict[str, float]
    bare_wire_us: float | None
    beyond_us: float


@dataclass(frozen=True, slots=True)
class DecodeByTransport:
    """Decoding with every expert on two workers; `saved_us` is what the lane saves a layer against gRPC."""

    layers: int
    tokens: int
    us_a_layer: dict[str, float]
    tokens_per_s: dict[str, float]
    saved_us: float
    ratio: float
    identical: bool


def bench_layer(model: Path, repeats: int, on_phase: Callable[[str], None]) -> list[LayerFigures]:
    """One remote layer over each transport, with one worker that holds every expert; interleaved runs."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in TRANSPORTS}
    bare: list[float] = []
    with LoopbackCluster(model, ("worker",), settings=PATIENCE) as loopback:
        for turn in range(4):
            for name in TRANSPORTS:
                on_phase(f"run {turn + 1} of 4 over {name}")
                cluster = _coordinator(loopback, name)
                try:
                    cluster.load()
                    probe = _Probe(cluster)
                    samples[name] += probe.run(repeats // 4)
                    if name == "lane":
                        bare += probe.bare_wire(repeats // 4)
                finally:
                    cluster.close()
    floor_us = statistics.median(bare)
    return [_figures(name, rows, floor_us) for name, rows in samples.items()]


def bench_decode(model: Path, tokens: int, runs: int, on_phase: Callable[[str], None]) -> DecodeByTransport:
    """Decode `tokens` tokens `runs` times with each transport, in turns, each over two workers of its own.

    What the lane saves is the median of the differences between neighbouring runs: a noisy machine disturbs both.
    """
    seconds: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    outputs: list[list[int]] = []
    with ExitStack() as stack:
        loaded: dict[str, LoadedModel] = {}
        layers = 0
        for name in TRANSPORTS:
            on_phase(f"starting two workers for {name}")
            loopback = stack.enter_context(LoopbackCluster(model, ("worker-1", "worker-2"), settings=PATIENCE))
            layers = len(loopback.checkpoint.shape.layers)
            cluster = _coordinator(loopback, name)
            stack.callback(cluster.close)
            loaded[name] = cluster.load()
            greedy_tokens(loaded[name], PROMPT, tokens)
        for run in range(runs):
            on_phase(f"decoding {run + 1} of {runs}")
            for name in TRANSPORTS:
                started = time.perf_counter()
                outputs.append(greedy_tokens(loaded[name], PROMPT, tokens))
                seconds[name].append(time.perf_counter() - started)
    per_layer = 1e6 / tokens / layers
    pairs = list(zip(seconds["lane"], seconds["grpc"], strict=True))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return DecodeByTransport(
        layers=layers,
        tokens=tokens,
        us_a_layer={name: round(value * per_layer, 1) for name, value in middle.items()},
        tokens_per_s={name: round(tokens / value, 2) for name, value in middle.items()},
        saved_us=round(statistics.median((grpc - lane) * per_layer for lane, grpc in pairs), 1),
        ratio=round(statistics.median(grpc / lane for lane, grpc in pairs), 3),
        identical=all(output == outputs[0] for output in outputs),
    )


def _coordinator(loopback: LoopbackCluster, transport: str) -> Cluster:
    loopback.hosts = loopback.hosts.model_copy(update={"transport": transport})
    names = (loopback.hosts.coordinator.name, *(worker.name for worker in loopback.hosts.workers))
    return loopback.coordinator(ClusterOptions(plan=on_workers(loopback.checkpoint, names)))


class _TimedExchange(Exchange):
    """An exchange that keeps the times of one layer."""

    def __init__(self) -> None:
        super().__init__(FIRST_ID)
        self.began = self.sent = self.ended = 0.0
        self.replies: list[tuple[float, ExecuteResult]] = []

    def send(
        self,
        transport: Transport,
        call: ExecuteCall,
        positions: np.ndarray,
        times: ReplyTimes,
        hedge_s: float | None = None,
    ) -> None:
        del hedge_s  # nothing is executed twice here
        self.began = time.perf_counter()
        super().send(transport, call, positions, times)
        self.sent = time.perf_counter()

    def collect(
        self, on_result: OnResult, hedge: Hedge | None = None, on_failure: OnFailure | None = None
    ) -> list[Failed]:
        del hedge, on_failure

        def timed(outstanding: Outstanding, result: ExecuteResult) -> None:
            self.replies.append((time.perf_counter(), result))
            on_result(outstanding, result)

        failed = super().collect(timed)
        self.ended = time.perf_counter()
        return failed


class _Probe:
    """Runs single layers of a loaded cluster."""

    def __init__(self, cluster: Cluster) -> None:
        shape = cluster.checkpoint.shape
        ready = cluster.links[0].ready
        if ready is None:
            raise WorkerUnreachable("the benchmark's worker is not there", "try again; its log says why")
        self._transport = ready.transport
        self._exchange = _TimedExchange()
        self._dispatcher = Dispatcher(cluster.layers, cluster.links, shape.hidden_size, cluster.dtype, self._exchange)
        self._layer = shape.layers[len(shape.layers) // 2].index
        self._shape, self._dtype = shape, COMPUTE_DTYPES[cluster.dtype][1]
        self._draw = np.random.default_rng(1)
        row_bytes = shape.hidden_size * COMPUTE_DTYPES[cluster.dtype][0].itemsize
        self._mean_bytes = (row_bytes * (1 + shape.top_k) + 8 * shape.top_k + 16) // 2

    def run(self, repeats: int) -> list[dict[str, float]]:
        return [self._once() for _ in range(WARM_UP + repeats)][WARM_UP:]

    def bare_wire(self, repeats: int) -> list[float]:
        """Microseconds of frames there and back that carry in both directions together what a layer does, each after
        a pause like that of a layer's compute: both ends have gone to sleep then, as they do in a layer."""
        lane = self._transport
        assert isinstance(lane, LaneTransport)
        payload = bytes(self._mean_bytes)
        times = []
        for _ in range(WARM_UP + repeats):
            time.sleep(PAUSE_S)
            started = time.perf_counter()
            lane.ping(payload, 10.0)
            times.append((time.perf_counter() - started) * 1e6)
        return times[WARM_UP:]

    def _once(self) -> dict[str, float]:
        x = mx.array(self._draw.standard_normal((1, self._shape.hidden_size)), self._dtype)
        chosen = self._draw.choice(self._shape.num_experts, self._shape.top_k, replace=False)
        indices = mx.array(chosen[None, :].astype(np.uint32))
        mx.eval(x, indices)
        exchange = self._exchange
        exchange.replies.clear()
        started = time.perf_counter()
        y = self._dispatcher.execute(self._layer, x, indices)
        ended = time.perf_counter()
        mx.eval(y)  # in a model the next layer's synchronisation does this
        arrived, result = exchange.replies[0]
        worker_s = (result.queue_us + result.compute_us + result.load_us) / 1e6
        seconds = {
            "total": ended - started,
            "prepare": exchange.began - started,
            "serialise": exchange.sent - exchange.began,
            "wire": arrived - exchange.sent - worker_s,
            "queue": result.queue_us / 1e6,
            "compute": (result.compute_us + result.load_us) / 1e6,
            "join": ended - arrived,
        }
        return {name: value * 1e6 for name, value in seconds.items()}


def _figures(transport: str, rows: list[dict[str, float]], floor_us: float) -> LayerFigures:
    beyond = statistics.median(row["total"] - row["compute"] for row in rows) - floor_us
    return LayerFigures(
        transport=transport,
        total_us=round(statistics.median(row["total"] for row in rows), 1),
        parts_us={part: round(statistics.median(row[part] for row in rows), 1) for part in PARTS},
        bare_wire_us=round(floor_us, 1),
        beyond_us=round(beyond, 1),
    )
