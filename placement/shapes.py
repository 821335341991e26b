"""Shapes of published MoE checkpoints at 4 bits, to plan for machines and models one does not have yet.

From the published configurations; an expert's bytes are 3 H I (bits / 8 + 4 / group) for affine 4-bit, group 64.
It knows sizes, no files: a checkpoint at hand is read by the registry instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan.common.errors import PlanError
from titan.placement.problem import Problem
from titan.placement.values import Node

DEFAULT_ATTENTION_BYTES_S = 400e9
DEFAULT_SYNC_S = 50e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one checkpoint.

    Args:
        layers: all layers; `dense` of them, the first ones, have no experts (`every` = 2: only every second has).
        expert_bytes: bytes of one expert (b).
    """

    name: str
    layers: int
    num_experts: int
    top_k: int
    hidden: int
    width: int
    dense: int = 0
    every: int = 1
    bytes_per_weight: float = 0.5 + 4 / 64
    bias_bytes: int = 0

    @property
    def moe_indexes(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.dense, self.layers) if (i - self.dense) % self.every == self.every - 1)

    @property
    def moe_layers(self) -> int:
        return len(self.moe_indexes)

    @property
    def expert_bytes(self) -> int:
        return int(3 * self.hidden * self.width * self.bytes_per_weight) + self.bias_bytes


_MXFP4 = {"bytes_per_weight": 0.53125, "bias_bytes": 2 * 3 * 2880}
SHAPES = {
    s.name: s
    for s in (
        Shape("olmoe", 16, 64, 8, 2048, 1024),
        Shape("qwen3_30b_a3b", 48, 128, 8, 2048, 768),
        Shape("qwen3_235b_a22b", 94, 128, 8, 4096, 1536),
        Shape("qwen3_next_80b", 48, 512, 10, 2048, 512),
        Shape("qwen3_5_35b_a3b", 40, 256, 8, 2048, 512),
        Shape("deepseek_v2_lite", 27, 64, 6, 2048, 1408, dense=1),
        Shape("deepseek_v3", 61, 256, 8, 7168, 2048, dense=3),
        Shape("kimi_k2", 61, 384, 8, 7168, 2048, dense=1),
        Shape("glm4_5_air", 46, 128, 8, 4096, 1408, dense=1),
        Shape("gpt_oss_20b", 24, 32, 4, 2880, 2880, **_MXFP4),
        Shape("gpt_oss_120b", 36, 128, 4, 2880, 2880, **_MXFP4),
        Shape("mixtral_8x7b", 32, 8, 2, 4096, 14336),
        Shape("ling_mini_2", 20, 256, 8, 2048, 512, dense=1),
        Shape("minimax_m2", 62, 256, 8, 3072, 1536),
        Shape("llama4_scout", 48, 16, 1, 5120, 8192),
        Shape("llama4_maverick", 48, 128, 1, 5120, 8192, every=2),
        Shape("granite_3b_a800m", 32, 40, 8, 1536, 512),
        Shape("dots1", 62, 128, 6, 4096, 1408, dense=1),
    )
}


def find_shape(name: str) -> Shape:
    """The shape by name, case and separators aside. Raises PlanError: unknown, naming those there are."""
    key = name.strip().lower().replace("-", "_").replace(".", "_")
    aliases = {"qwen3_235b": "qwen3_235b_a22b", "qwen3_30b": "qwen3_30b_a3b", "qwen3_moe": "qwen3_30b_a3b"}
    shape = SHAPES.get(aliases.get(key, key))
    if shape is None:
        raise PlanError(f"there is no shape {name!r}", f"use one of {', '.join(sorted(SHAPES))}")
    return shape


def shape_problem(
    shape: Shape,
    nodes: tuple[Node, ...],
    *,
    attention_s: float | None = None,
    frequencies: tuple[tuple[float, ...], ...] | None = None,
    batch_rows: tuple[int, ...] = (1, 4, 8),
) -> Problem:
    """The placement problem of a shape.

    `attention_s`, a layer's time outside its experts, defaults to reading about 4 H^2 weights at 4 bits and 400 GB/s,
    and 50 microseconds of kernels.
    """
    if attention_s is None:
        attention_s = 50e-6 + 4 * shape.hidden**2 * shape.bytes_per_weight / DEFAULT_ATTENTION_BYTES_S
    count = shape.moe_layers
    return Problem(
        fingerprint=f"shape:{shape.name}",
        layers=shape.moe_indexes,
        expert_bytes=(shape.expert_bytes,) * count,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        attention_s=(attention_s,) * count,
        nodes=nodes,
        sync_s=DEFAULT_SYNC_S,
        other_s=attention_s * (shape.layers - count),
        activation_bytes=2 * shape.hidden,
        frequencies=frequencies,
        batch_rows=batch_rows,
    )
