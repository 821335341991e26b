"""What losing a worker costs the tokens that follow: killed, or stopped so that it stays connected and silent.

Two workers on loopback hold every expert between them; one is lost in the middle of an answer, the other afterwards,
and what is left is the local-only step: every expert from this machine's disk through the plan's slots.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan.coordinator.bench.alone import decode_alone, greedy_tokens
from titan.coordinator.bench.placement import on_workers
from titan.coordinator.cluster import ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.generation.model import LoadedModel

Fault = Literal["killed", "stopped"]
FAULTS: tuple[Fault, ...] = ("killed", "stopped")
PROMPT = tuple(range(30, 46))
NEXT = 4  # tokens after the one in which the worker was lost


@dataclass(frozen=True, slots=True)
class LossFigures:
    """Milliseconds a token; medians over the runs, but for `longest`.

    Args:
        steady_ms: with both workers.
        fault_ms: the slowest of the steps from the fault until the worker was set aside.
        longest_ms: the longest step of any run.
        next_ms: of the NEXT tokens after that.
        alone_ms: with neither worker: the local-only step.
        next_over_alone: next_ms ÷ alone_ms.
        limit_ms: `timeouts.execute`: no call of one row has a later deadline.
        identical: whether every run gave the tokens that it gave before.
    """

    fault: Fault
    steady_ms: float
    fault_ms: float
    longest_ms: float
    next_ms: float
    alone_ms: float
    next_over_alone: float
    limit_ms: float
    identical: bool


def bench_loss(model: Path, tokens: int, runs: int, on_phase: Callable[[str], None]) -> list[LossFigures]:
    """Each fault `runs` times, in turns, each in a cluster of its own, in the middle of `tokens` tokens."""
    found: dict[Fault, list[LossFigures]] = {fault: [] for fault in FAULTS}
    for run in range(runs):
        for fault in FAULTS:
            on_phase(f"a worker is {fault}, {run + 1} of {runs}")
            found[fault].append(_once(model, fault, tokens))
    return [_middle(figures) for figures in found.values()]


def _once(model: Path, fault: Fault, tokens: int) -> LossFigures:
    with LoopbackCluster(model) as loopback:
        names = (loopback.hosts.coordinator.name, *(worker.name for worker in loopback.hosts.workers))
        cluster = loopback.coordinator(ClusterOptions(plan=on_workers(loopback.checkpoint, names)))
        try:
            loaded = cluster.load()
            expected = greedy_tokens(loaded, PROMPT, tokens)
            first, second = loopback.workers
            middle = tokens // 2
            seconds: list[float] = []
            drawn: list[int] = []
            lost_at = tokens
            for place, (token, elapsed) in enumerate(_steps(loaded, tokens)):
                drawn.append(token)
                seconds.append(elapsed)
                if place == middle - 1:
                    first.kill() if fault == "killed" else first.pause()
                elif place >= middle and lost_at == tokens and cluster.links[0].ready is None:
                    lost_at = place
            second.kill()
            if fault == "stopped":
                first.kill()
            greedy_tokens(loaded, PROMPT, 4)  # the loss of the second is not looked at
            alone = [elapsed for _, elapsed in _steps(loaded, tokens)]
        finally:
            cluster.close()
    after = seconds[lost_at + 1 : lost_at + 1 + NEXT]
    next_s, alone_s = (statistics.median(after) if after else float("nan")), statistics.median(alone)
    return LossFigures(
        fault=fault,
        steady_ms=1e3 * statistics.median(seconds[1:middle]),
        fault_ms=1e3 * max(seconds[middle : lost_at + 1]),
        longest_ms=1e3 * max(seconds[1:]),
        next_ms=1e3 * next_s,
        alone_ms=1e3 * alone_s,
        next_over_alone=next_s / alone_s,
        limit_ms=1e3 * loopback.hosts.timeouts.execute,
        identical=drawn == expected,
    )


def _steps(loaded: LoadedModel, tokens: int) -> Iterator[tuple[int, float]]:
    """(token, seconds) of each step; the first has the prompt in it."""
    started = time.perf_counter()
    for step in decode_alone(loaded.model, loaded.make_cache(), PROMPT, tokens):
        yield step.token, time.perf_counter() - started
        started = time.perf_counter()


def _middle(figures: list[LossFigures]) -> LossFigures:
    def median(name: str) -> float:
        return round(statistics.median(getattr(f, name) for f in figures), 3)

    return LossFigures(
        fault=figures[0].fault,
        steady_ms=median("steady_ms"),
        fault_ms=median("fault_ms"),
        longest_ms=round(max(f.longest_ms for f in figures), 3),
        next_ms=median("next_ms"),
        alone_ms=median("alone_ms"),
        next_over_alone=median("next_over_alone"),
        limit_ms=figures[0].limit_ms,
        identical=all(f.identical for f in figures),
    )
