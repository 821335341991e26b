"""Decode on this machine alone: mlx-lm, Titan with everything at home, Titan asking for every expert.

All variants run in one process, interleaved, on the same prompt, so that a noisy machine disturbs them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from titan.common.config.hosts import HostsConfig
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.slots.buffers import slot_bytes
from titan.coordinator.bench.alone import greedy_tokens
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.generation.model import LoadedModel

PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Medians over the repeats; ratios are medians of the ratios within each repeat."""

    model: str
    tokens: int
    repeats: int
    layers: int
    mlx_lm_tokens_per_s: float
    resident_tokens_per_s: float
    demand_tokens_per_s: float
    resident_over_mlx_lm: float
    demand_over_mlx_lm: float
    demand_overhead_us_per_layer: float
    identical: bool


def bench_decode(path: Path, tokens: int, repeats: int, on_repeat: Callable[[int], None]) -> DecodeFigures:
    """Decode `tokens` tokens with each variant, `repeats` times."""
    checkpoint = open_checkpoint(path)
    reference, _ = load_model(checkpoint.path, lazy=True, model_config=dict(checkpoint.config_defaults))
    cluster, loaded = load_alone(checkpoint)
    if cluster.dtype == "float32":
        reference.set_dtype(mx.float32)
    mx.eval(reference.parameters())
    prompt = list(range(1, PROMPT_TOKENS + 1))

    def by_mlx_lm() -> list[int]:
        return [int(token) for token, _ in generate_step(mx.array(prompt), reference, max_tokens=tokens)]

    def resident() -> list[int]:
        return greedy_tokens(loaded, prompt, tokens, lookahead=True)

    def demand() -> list[int]:
        for layer in cluster.layers.values():
            layer.whole = False  # every expert stays in its slot, but each layer asks for it
        try:
            return greedy_tokens(loaded, prompt, tokens)
        finally:
            for layer in cluster.layers.values():
                layer.whole = True

    variants = (by_mlx_lm, resident, demand)
    expected = [variant() for variant in variants]  # warm up, and compare
    seconds: list[list[float]] = []
    for repeat in range(repeats):
        order = variants if repeat % 2 == 0 else variants[::-1]
        took = {variant: _time(variant) for variant in order}
        seconds.append([took[variant] for variant in variants])
        on_repeat(repeat + 1)
    loaded.close()
    layers = len(checkpoint.shape.layers)
    return DecodeFigures(
        model=str(path),
        tokens=tokens,
        repeats=repeats,
        layers=layers,
        mlx_lm_tokens_per_s=statistics.median(tokens / s[0] for s in seconds),
        resident_tokens_per_s=statistics.median(tokens / s[1] for s in seconds),
        demand_tokens_per_s=statistics.median(tokens / s[2] for s in seconds),
        resident_over_mlx_lm=statistics.median(s[0] / s[1] for s in seconds),
        demand_over_mlx_lm=statistics.median(s[0] / s[2] for s in seconds),
        demand_overhead_us_per_layer=statistics.median((s[2] - s[0]) / tokens / layers * 1e6 for s in seconds),
        identical=expected[0] == expected[1] == expected[2],
    )


def load_alone(checkpoint: Checkpoint, experts_bytes: int | None = None) -> tuple[Cluster, LoadedModel]:
    """A coordinator without workers, with memory for `experts_bytes` of experts, or for all of them."""
    if experts_bytes is None:
        shape = checkpoint.shape
        experts_bytes = sum(slot_bytes(spec, "float32") for spec in shape.layers) * shape.num_experts
    hosts = HostsConfig.model_validate({"model": str(checkpoint.path), "coordinator": {"memory": experts_bytes}})
    cluster = Cluster(hosts, checkpoint, None, ClusterOptions())
    return cluster, cluster.load()


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
