"""Predicted against measured: the step the cost model promises for several plans, beside the step that is decoded.

A loopback cluster of two workers, with a delay injected between them and the coordinator. Figures are measured first,
over the delayed link, as a start of the coordinator does it. Then other text is decoded, from which the coordinator
learns how rows resemble the rows before, as it does while serving; then each plan is installed and decoded with.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from titan.common.config.hosts import HostsConfig
from titan.coordinator.bench.alone import greedy_tokens
from titan.coordinator.bench.placement import on_workers
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.generation.model import LoadedModel
from titan.coordinator.moving import begin_move, finish_move, move_layer
from titan.coordinator.planning import expected_reads, expected_step_s
from titan.placement import Plan, Problem, solve
from titan.placement.drift import RoutingDrift

PROXY_HOST = "127.0.0.2"
PROMPT = [43, 459, 961, 344, 296, 411, 270, 857]
OTHER_PROMPTS = ([327, 326, 411, 43], [857, 296, 961], [459, 270, 344, 326, 43], [102, 517, 296, 33])
SERVED_TOKENS = 192
STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """One plan at one delay; error = predicted ÷ measured - 1. `at_start_ms` is what is predicted before any text."""

    delay_us: int
    plan: str
    at_start_ms: float
    predicted_ms: float
    measured_ms: float
    error: float
    executed_remote: float
    predicted_reads: float
    measured_reads: float


def bench_predict(
    model: Path, delays_us: tuple[int, ...], tokens: int, repeats: int, report: Callable[[str], None]
) -> list[Prediction]:
    """Predict and measure every plan at every delay (one way, in each direction)."""
    found: list[Prediction] = []
    for delay_us in delays_us:
        with LoopbackCluster(model) as loopback, _delayed(loopback, delay_us) as hosts:
            options = ClusterOptions(measure=True)
            cluster = Cluster(hosts, loopback.checkpoint, loopback.credentials, options, report)
            try:
                loaded = cluster.load()
                problem = cluster.planner.problem(cluster.figures)
                _serve(loaded)
                for name, plan in _plans(cluster, problem):
                    report(f"{delay_us} µs: {name}")
                    found.append(_measure(cluster, loaded, problem, plan, name, delay_us, tokens, repeats))
            finally:
                cluster.close()
    return found


def _serve(loaded: LoadedModel) -> None:
    """Text that is not measured, for the coordinator to learn from."""
    for prompt in OTHER_PROMPTS:
        greedy_tokens(loaded, prompt, SERVED_TOKENS)


def _plans(cluster: Cluster, problem: Problem) -> Iterator[tuple[str, Plan]]:
    assert cluster.plan is not None
    yield "searched", cluster.plan
    yield "in proportion to memory", replace(solve(problem, method="proportional"), predicted=cluster.plan.predicted)
    nodes = [node.name for node in problem.nodes]
    everywhere = on_workers(cluster.checkpoint, nodes)
    yield "all on workers", replace(everywhere, predicted=cluster.plan.predicted)


def _measure(
    cluster: Cluster,
    loaded: LoadedModel,
    problem: Problem,
    plan: Plan,
    name: str,
    delay_us: int,
    tokens: int,
    repeats: int,
) -> Prediction:
    for position in begin_move(cluster, plan):
        move_layer(cluster, plan, position)
    finish_move(cluster, plan)
    assert cluster.dispatcher is not None
    if name != "searched":
        cluster.dispatcher.costs = None  # whoever the plan names executes, also where reading would be cheaper
        assert cluster.figures is not None
        problem = replace(problem, sync_s=cluster.figures.home.sync_s)  # and nothing is chosen
    start_s = expected_step_s(problem, plan)
    assert cluster.dispatcher.routing is not None
    shape = cluster.checkpoint.shape
    told = RoutingDrift(len(shape.layers), shape.num_experts, shape.top_k, None)
    told.look(*cluster.dispatcher.routing.total())
    problem = replace(problem, frequencies=told.seen(), reuse=cluster.reuse)
    cluster.workers.wait()
    greedy_tokens(loaded, PROMPT, tokens)
    executed = cluster.dispatcher.executed
    reads = 0
    before, everything = sum(executed.remote.values()), _pairs(cluster)
    seconds = []
    for _ in range(repeats):
        mx.synchronize()
        read, start = executed.ssd, time.perf_counter()
        greedy_tokens(loaded, PROMPT, 1)
        prefill_s, prefill_reads = time.perf_counter() - start, executed.ssd - read
        read, start = executed.ssd, time.perf_counter()
        greedy_tokens(loaded, PROMPT, tokens + 1)
        seconds.append((time.perf_counter() - start - prefill_s) / tokens)
        reads += executed.ssd - read - prefill_reads
    measured_s = statistics.median(seconds)
    predicted_s = expected_step_s(problem, plan)
    share = (sum(executed.remote.values()) - before) / max(1, _pairs(cluster) - everything)
    return Prediction(
        delay_us,
        name,
        start_s * 1e3,
        predicted_s * 1e3,
        measured_s * 1e3,
        predicted_s / measured_s - 1,
        share,
        expected_reads(problem, plan),
        reads / (repeats * tokens),
    )


def _pairs(cluster: Cluster) -> int:
    assert cluster.dispatcher is not None
    executed = cluster.dispatcher.executed
    return executed.local + executed.ssd + executed.hedged + sum(executed.remote.values())


@contextmanager
def _delayed(loopback: LoopbackCluster, delay_us: int) -> Iterator[HostsConfig]:
    """hosts.yaml of the cluster with the workers behind a delaying proxy; without a delay, as it is."""
    if delay_us == 0:
        yield loopback.hosts
        return
    ports: list[str] = []
    for worker in loopback.workers:
        entry = next(line for line in worker.log if line.get("message") == "listening")
        ports += [worker.address.rpartition(":")[2], str(entry["lane_port"])]
    command = [sys.executable, "-m", "titan.coordinator.bench.delay_proxy", str(delay_us), PROXY_HOST, "127.0.0.1"]
    proxy = subprocess.Popen([*command, *ports], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None
        proxy.stdout.readline()
        workers = [
            {"name": worker.name, "addresses": [f"{PROXY_HOST}:{worker.address.rpartition(':')[2]}"]}
            for worker in loopback.workers
        ]
        yield HostsConfig.model_validate(loopback.hosts.model_dump(exclude_unset=True) | {"workers": workers})
    finally:
        proxy.kill()
        proxy.wait(STOP_S)
        for pipe in (proxy.stdin, proxy.stdout):
            if pipe is not None:
                pipe.close()
