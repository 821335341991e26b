"""The question a plan answers: a model's experts, the nodes with their figures, and what the router is expected to do.

A frozen value with `check()`. It knows nothing of checkpoints or networks: whoever measures fills it in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan.common.errors import PlanViolation
from titan.common.registry.shape import ModelShape
from titan.placement.reuse import LAGS, Reuse
from titan.placement.values import MAX_EXPERTS, MAX_LAYERS, MAX_NODES, MAX_TOP_K, Node


@dataclass(frozen=True, slots=True)
class Problem:
    """One placement problem.

    Args:
        fingerprint: of the checkpoint.
        layers: the model's own numbers of its MoE layers, ascending.
        expert_bytes: bytes of one expert (b), per MoE layer.
        num_experts, top_k: E and K.
        attention_s: seconds of a layer outside its experts (tau_attn), per MoE layer.
        nodes: node 0 is the coordinator.
        sync_s: one device-host synchronisation, paid in every layer that is not wholly on node 0.
        other_s: the rest of a step: dense layers, head, sampling.
        activation_bytes: one row on the wire, one way (d times the bytes of an element).
        frequencies: [moe layer][expert] -> how often a row selects the expert, summing to top_k a layer;
            None: every expert equally often.
        reuse: how rows resemble the rows before, per MoE layer (`reuse.ReuseCounts.fresh`); None: not at all.
        batch_rows: batch sizes to predict tokens a second for.
        energy_weight, traffic_weight: lambda (seconds a joule) and mu of the objective (7); a byte's cost on a link is
            1 / bandwidth. The bound and the gap then refer to the objective, leaving out what cannot be negative.
        reduced: whether workers return one sum a row (wire precision `reduced`).
    """

    fingerprint: str
    layers: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    num_experts: int
    top_k: int
    attention_s: tuple[float, ...]
    nodes: tuple[Node, ...]
    sync_s: float = 0.0
    other_s: float = 0.0
    activation_bytes: int = 0
    frequencies: tuple[tuple[float, ...], ...] | None = None
    reuse: Reuse | None = None
    batch_rows: tuple[int, ...] = (1, 4, 8)
    energy_weight: float = 0.0
    traffic_weight: float = 0.0
    reduced: bool = False

    @staticmethod
    def from_shape(shape: ModelShape, nodes: tuple[Node, ...], *, attention_s: float, **more: object) -> Problem:
        """The problem of a checkpoint's shape; `attention_s` is one layer's."""
        return Problem(
            fingerprint=shape.fingerprint,
            layers=tuple(spec.index for spec in shape.layers),
            expert_bytes=tuple(spec.expert_bytes for spec in shape.layers),
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            attention_s=(attention_s,) * len(shape.layers),
            nodes=nodes,
            **({"activation_bytes": shape.hidden_size * 2} | more),  # type: ignore[arg-type]
        )

    def check(self) -> None:
        """Raises PlanViolation: a figure out of bounds, naming it."""
        _need(0 < len(self.layers) <= MAX_LAYERS, f"{len(self.layers)} MoE layers", "a model has 1 to 1024")
        _need(
            len(self.expert_bytes) == len(self.attention_s) == len(self.layers),
            f"{len(self.layers)} layers, {len(self.expert_bytes)} sizes, {len(self.attention_s)} attention times",
            "give one of each a MoE layer",
        )
        _need(all(type(b) is int and b > 0 for b in self.expert_bytes), "an expert's bytes are not positive")
        _need(1 <= self.num_experts <= MAX_EXPERTS, f"num_experts is {self.num_experts}", f"1 to {MAX_EXPERTS}")
        high = min(self.num_experts, MAX_TOP_K)
        _need(1 <= self.top_k <= high, f"top_k is {self.top_k}", f"it must be in 1..{high}")
        _need(0 < len(self.nodes) <= MAX_NODES, f"{len(self.nodes)} nodes", f"1 to {MAX_NODES}")
        for node in self.nodes:
            node.check()
        names = [n.name for n in self.nodes]
        _need(len(set(names)) == len(names), f"two nodes share a name among {names[:8]}", "give each its own name")
        figures = (*self.attention_s, self.sync_s, self.other_s, self.energy_weight, self.traffic_weight)
        _need(
            all(math.isfinite(v) and v >= 0 for v in figures),
            "attention_s, sync_s, other_s or a weight is negative or not a number",
            "measure again",
        )
        _need(type(self.activation_bytes) is int and 0 <= self.activation_bytes <= 1 << 30, "activation_bytes")
        _need(all(type(b) is int and 1 <= b <= 4096 for b in self.batch_rows), "batch sizes must be 1 to 4096 rows")
        if self.frequencies is not None:
            self._check_frequencies(self.frequencies)
        if self.reuse is not None:
            good = len(self.reuse) == len(self.layers) and all(
                len(row) == len(LAGS) and all(1 >= a >= b >= 0 for a, b in zip((1.0, *row), row, strict=False))
                for row in self.reuse
            )
            _need(good, "its reuse is not shares that fall with the lag, a row a layer", "record a trace of this model")

    def _check_frequencies(self, frequencies: tuple[tuple[float, ...], ...]) -> None:
        mend = "record a trace of this model"
        _need(len(frequencies) == len(self.layers), f"frequencies for {len(frequencies)} layers", mend)
        for layer, row in zip(self.layers, frequencies, strict=True):
            _need(len(row) == self.num_experts, f"layer {layer} has {len(row)} frequencies", mend)
            good = all(math.isfinite(f) and 0 <= f <= 1 + 1e-9 for f in row)
            _need(good, f"a frequency of layer {layer} is not in 0..1", mend)
            _need(
                abs(sum(row) - self.top_k) <= 1e-6 * self.top_k + 1e-9,
                f"frequencies of layer {layer} sum to {sum(row):.6g}, not to top_k = {self.top_k}",
                mend,
            )


def _need(condition: bool, cause: str, mend: str = "") -> None:
    if not condition:
        raise PlanViolation(f"the placement problem is not valid: {cause}", mend)
