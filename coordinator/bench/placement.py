"""A plan for measuring the way to workers: every expert on a worker, dealt out in turn. Pure; not a good plan."""

from __future__ import annotations

from collections.abc import Sequence

from titan.common.arrays import compute_dtype
from titan.common.registry import Checkpoint
from titan.common.slots.buffers import slot_bytes
from titan.placement import Node, Plan

UNLIMITED_BYTES = 1 << 50


def on_workers(checkpoint: Checkpoint, nodes: Sequence[str]) -> Plan:
    """Nothing at home but top-k slots a layer; expert e on worker 1 + e mod (number of workers)."""
    shape = checkpoint.shape
    workers = len(nodes) - 1
    counts = [sum(e % workers == w for e in range(shape.num_experts)) for w in range(workers)]
    floats = {t.dtype for t in checkpoint.non_expert_tensors if t.dtype in ("F32", "F16", "BF16")}
    return Plan(
        fingerprint=shape.fingerprint,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        layers=tuple(spec.index for spec in shape.layers),
        expert_bytes=tuple(slot_bytes(spec, compute_dtype(floats)) for spec in shape.layers),
        nodes=tuple(Node(name, UNLIMITED_BYTES, compute_s=0.0) for name in nodes),
        residency=tuple(tuple((1 + e % workers,) for e in range(shape.num_experts)) for _ in shape.layers),
        slots=tuple((count,) * len(shape.layers) for count in (shape.top_k, *counts)),
    )
