"""What hints bring: decoding over two workers that read experts from their own copies, with and without them, in turns.

One cluster decodes the same tokens with every variant. The workers say themselves what they read and how long requests
waited for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from titan.common.errors import WorkerUnreachable
from titan.common.prefetch.build import make_prefetcher
from titan.common.prefetch.prefetcher import Prefetcher
from titan.common.store import CacheMode
from titan.coordinator.bench.alone import greedy_tokens
from titan.coordinator.bench.placement import on_workers
from titan.coordinator.cluster import READERS, Cluster, ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.demo.processes import PROGRAM
from titan.coordinator.remote.hints import HintSender
from titan.placement import Plan
from titan.proto.titan.v1 import worker_pb2 as pb

NAMES = ("worker-1", "worker-2")
PATIENCE = {"timeouts": {"execute": "10s"}}
PROMPT = (11, 12, 13, 14)
STATUS_S = 10.0
OFF = ("off", None)


@dataclass(frozen=True, slots=True)
class HintFigures:
    """Means a token of one variant; `over_off` is the median of its runs ÷ the runs without hints beside them.

    `hit_rate`, `loads`, `useful` and `stall_ms` are the two workers' together.
    """

    variant: str
    token_ms: float
    over_off: float
    hit_rate: float
    loads: float
    prefetched: float
    useful: float
    late: float
    stall_ms: float
    hints: float
    identical: bool


def bench_hints(
    model: Path,
    slots: int,
    variants: list[tuple[str, int | None]],
    tokens: int,
    runs: int,
    reads: CacheMode,
    on_phase: Callable[[str], None],
) -> list[HintFigures]:
    """Decode with each (predictor, experts to read a layer; None: what pays) and without, `runs` times in turns.

    Args:
        slots: cache slots a layer on each worker; nothing is pinned anywhere.
    """
    program = (*PROGRAM, "--reads", str(reads))
    with LoopbackCluster(model, NAMES, settings=PATIENCE, own_copies=True, program=program) as loopback:
        plan = _caches_only(loopback, slots)
        cluster = loopback.coordinator(ClusterOptions(plan=plan))
        try:
            return _measure(cluster, [OFF, *variants], tokens, runs, on_phase)
        finally:
            cluster.close()


def _measure(
    cluster: Cluster, variants: list[tuple[str, int | None]], tokens: int, runs: int, on_phase: Callable[[str], None]
) -> list[HintFigures]:
    loaded = cluster.load()
    assert cluster.dispatcher is not None
    prefetchers = [_prefetcher(cluster, *variant) for variant in variants]
    expected = greedy_tokens(loaded, PROMPT, tokens)
    seconds: list[list[float]] = [[] for _ in variants]
    spent: list[list[pb.CacheStatus]] = [[] for _ in variants]
    identical = [True] * len(variants)
    for run in range(-1, runs):  # the first lets predictors and caches learn
        on_phase(f"run {run + 1} of {runs}")
        for number, prefetcher in enumerate(prefetchers):
            cluster.dispatcher.prefetcher = prefetcher
            before = _caches(cluster)
            started = time.perf_counter()
            found = greedy_tokens(loaded, PROMPT, tokens)
            took = time.perf_counter() - started
            if run < 0:
                continue
            seconds[number].append(took)
            spent[number].append(_difference(_caches(cluster), before))
            identical[number] &= found == expected
    return [
        _figures(name, m, seconds[i], seconds[0], spent[i], tokens, identical[i])
        for i, (name, m) in enumerate(variants)
    ]


def _figures(
    name: str,
    m: int | None,
    seconds: list[float],
    off: list[float],
    spent: list[pb.CacheStatus],
    tokens: int,
    identical: bool,
) -> HintFigures:
    total = _sum(spent)
    each = 1 / (tokens * len(spent))
    return HintFigures(
        variant=name if m is None else f"{name}, m = {m}",
        token_ms=1e3 * statistics.median(seconds) / tokens,
        over_off=statistics.median(a / b for a, b in zip(seconds, off, strict=True)),
        hit_rate=total.hits / max(1, total.hits + total.misses),
        loads=total.loads * each,
        prefetched=total.prefetched * each,
        useful=total.useful * each,
        late=total.late * each,
        stall_ms=1e3 * total.stall_s * each,
        hints=total.hints * each,
        identical=identical,
    )


def _prefetcher(cluster: Cluster, name: str, m: int | None) -> Prefetcher | None:
    assert cluster.model is not None
    layers, routers = list(cluster.layers.values()), dict(enumerate(cluster.model.routers))
    experts = cluster.checkpoint.shape.num_experts
    return make_prefetcher(name, layers, experts, READERS, routers, forced=m, remote=HintSender(cluster.links))


def _caches_only(loopback: LoopbackCluster, slots: int) -> Plan:
    """Nobody holds anything; workers have `slots` cache slots a layer, this machine as few as it must have."""
    names = (loopback.hosts.coordinator.name, *NAMES)
    held = on_workers(loopback.checkpoint, names)
    shape = loopback.checkpoint.shape
    rows = [tuple(shape.top_k if node == 0 else slots for _ in shape.layers) for node in range(len(names))]
    nobody = tuple(tuple(() for _ in range(shape.num_experts)) for _ in shape.layers)
    plan = replace(held, residency=nobody, slots=tuple(rows))
    plan.validate()
    return plan


def _caches(cluster: Cluster) -> pb.CacheStatus:
    """What both workers have counted by now."""
    for link in cluster.links:
        link.last_status = None
    deadline = time.monotonic() + STATUS_S
    while any(link.last_status is None for link in cluster.links):
        if time.monotonic() > deadline:
            raise WorkerUnreachable("a worker does not say what it has read")
        time.sleep(0.02)
    return _sum([link.last_status.cache for link in cluster.links if link.last_status is not None])


def _sum(counted: list[pb.CacheStatus]) -> pb.CacheStatus:
    total = pb.CacheStatus()
    for cache in counted:
        for field, value in cache.ListFields():
            setattr(total, field.name, getattr(total, field.name) + value)
    return total


def _difference(after: pb.CacheStatus, before: pb.CacheStatus) -> pb.CacheStatus:
    spent = pb.CacheStatus()
    for field, value in after.ListFields():
        setattr(spent, field.name, value - getattr(before, field.name))
    return spent
