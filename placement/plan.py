"""The plan: which node holds which expert, how many slots each table has, and what that is predicted to cost.

A frozen value that checks itself and travels as JSON. It knows neither sockets, nor MLX, nor how it was found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from titan.common.errors import PlanVersionError, PlanViolation
from titan.placement.loose import deal
from titan.placement.values import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_NODES,
    MAX_TOP_K,
    MEND,
    Node,
    Prediction,
    check_figure,
    check_whole,
    need,
)

__all__ = ["PLAN_VERSION", "Node", "Plan", "Prediction"]

PLAN_VERSION = 1
MAX_PLAN_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Residency and slots under (1)-(4), with the prediction they were chosen by.

    Args:
        version: PLAN_VERSION of the code that wrote it.
        fingerprint: of the checkpoint the plan is for.
        num_experts, top_k: E and K.
        layers: the model's own numbers of its MoE layers, ascending.
        expert_bytes: bytes of one expert (b), per MoE layer.
        nodes: node 0 is the coordinator.
        residency: [moe layer][expert] -> indexes of the nodes that hold the expert pinned in memory (x), ascending;
            empty: it is read from an SSD into a cache slot when it is selected, see `served_by`.
        slots: [node][moe layer] -> slots of that table, pinned and cache together. Only a worker with a copy of the
            checkpoint may have cache slots.
        reads: [moe layer][expert] -> the node that reads it when no node holds it; empty: they are dealt out, see
            `served_by`.
        predicted: None when nothing was predicted.
        baselines: the same prediction for naive placements, by name.
        lower_bound_s: no placement on these nodes has a smaller expected step, of one row or more, when rows are drawn
            by the routing model independently of the rows before.
        gap: expected step of such rows / lower_bound_s - 1. `predicted` is that step too, unless it was made with
            reuse from row to row: then it is shorter, and may be below the bound.
        advice: sentences for people.
    """

    fingerprint: str
    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    nodes: tuple[Node, ...]
    residency: tuple[tuple[tuple[int, ...], ...], ...]
    slots: tuple[tuple[int, ...], ...]
    predicted: Prediction | None = None
    baselines: dict[str, Prediction] = field(default_factory=dict)
    lower_bound_s: float | None = None
    gap: float | None = None
    advice: tuple[str, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    version: int = PLAN_VERSION

    def position(self, layer_index: int) -> int:
        """Place of the model's layer `layer_index` among the MoE layers; KeyError when it is dense or absent."""
        try:
            return self.layers.index(layer_index)
        except ValueError:
            raise KeyError(layer_index) from None

    def held_by(self, node: int) -> tuple[tuple[int, ...], ...]:
        """Per MoE layer, the experts pinned in the memory of `node`, ascending."""
        return tuple(tuple(e for e, holders in enumerate(row) if node in holders) for row in self.residency)

    def served_by(self, node: int) -> tuple[tuple[int, ...], ...]:
        """Per MoE layer, the experts that no node holds and that `node` reads into its cache slots when selected."""
        if self.reads:
            return tuple(
                tuple(e for e, who in enumerate(row) if not who and of[e] == node)
                for row, of in zip(self.residency, self.reads, strict=True)
            )
        nodes = range(len(self.nodes))
        return tuple(
            deal([e for e, who in enumerate(row) if not who], [self.cache_slots(i, n) for n in nodes])[node]
            for i, row in enumerate(self.residency)
        )

    def kept_by(self, node: int) -> int:
        """Of the experts that `node` serves without pinning them, so many always find a cache slot."""
        return sum(min(self.cache_slots(i, node), len(served)) for i, served in enumerate(self.served_by(node)))

    def read_by(self, node: int) -> int:
        """The others: so many experts `node` has to read from its own disk."""
        return sum(map(len, self.served_by(node))) - self.kept_by(node)

    def is_whole(self, layer: int) -> bool:
        """True when node 0 holds every expert of MoE layer position `layer`: no synchronisation is needed there."""
        return all(0 in holders for holders in self.residency[layer])

    def cache_slots(self, layer: int, node: int = 0) -> int:
        """Slots of a node's table in MoE layer position `layer` that are not pinned."""
        return self.slots[node][layer] - sum(node in holders for holders in self.residency[layer])

    def bytes_on(self, node: int) -> int:
        """Bytes of all slot tables on `node`."""
        return sum(s * b for s, b in zip(self.slots[node], self.expert_bytes, strict=True))

    def to_json(self) -> str:
        """JSON with the fields by their names."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Parse, rebuild and validate.

        Raises:
            PlanVersionError: written by another version of the format.
            PlanViolation: too long, not JSON, a field missing or of another type, a constraint violated.
        """
        if len(text) > MAX_PLAN_JSON_BYTES:
            raise PlanViolation(f"the plan has {len(text)} bytes, more than {MAX_PLAN_JSON_BYTES}")
        try:
            raw = json.loads(text, parse_constant=_no_constant)
            if not isinstance(raw, dict):
                raise PlanViolation(f"the plan is {type(raw).__name__}, not an object")
            if raw.get("version") != PLAN_VERSION:
                raise PlanVersionError(
                    f"the plan has version {raw.get('version')!r}, this Titan reads {PLAN_VERSION}",
                    MEND,
                )
            plan = _rebuild(raw)
            plan.validate()
            return plan
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanViolation(f"the plan cannot be read ({type(error).__name__}: {error})", MEND) from error

    def validate(self) -> None:
        """Check (mem), (exec), (res) and the slots that keep any row executable when every worker is lost.

        Raises:
            PlanViolation: says which constraint, where, and by how much.
        """
        self._check_sizes()
        for layer, row in enumerate(self.residency):
            where = f"layer {self.layers[layer]}"
            need(len(row) == self.num_experts, f"{where} places {len(row)} experts of {self.num_experts} (exec)")
            held = [0] * len(self.nodes)
            for expert, holders in enumerate(row):
                for node in holders:
                    check_whole(node, 0, len(self.nodes) - 1, f"a holder of expert {expert} in {where} (exec)")
                    held[node] += 1
                need(list(holders) == sorted(set(holders)), f"holders {holders} of expert {expert} in {where}")
            for node, pinned in enumerate(held):
                slots = self.slots[node][layer]
                need(
                    pinned <= slots <= self.num_experts,
                    f"node {self.nodes[node].name} pins {pinned} experts in {slots} slots in {where} (res)",
                )
            least = min(self.num_experts, held[0] + self.top_k)
            need(
                self.slots[0][layer] >= least,
                f"node {self.nodes[0].name} has {self.slots[0][layer]} slots in {where}, "
                f"needs {least} to run any row alone (res)",
            )
        for index, node in enumerate(self.nodes):
            if index and self.reads:
                for layer, experts in enumerate(self.served_by(index)):
                    slots = self.cache_slots(layer, index)
                    where = f"layer {self.layers[layer]}"
                    need(
                        slots > 0 or not experts, f"node {node.name} reads in {where} and has no cache slot there (res)"
                    )
            used = self.bytes_on(index)
            need(
                used <= node.memory_bytes,
                f"node {node.name} is given {used} bytes of experts, it has {node.memory_bytes} (mem)",
            )

    def _check_sizes(self) -> None:
        need(isinstance(self.fingerprint, str) and 0 < len(self.fingerprint) <= 256, "the fingerprint")
        check_whole(self.num_experts, 1, MAX_EXPERTS, "num_experts")
        check_whole(self.top_k, 1, min(self.num_experts, MAX_TOP_K), "top_k")
        need(0 < len(self.layers) <= MAX_LAYERS, f"{len(self.layers)} MoE layers")
        for layer in self.layers:
            check_whole(layer, 0, 1 << 20, "a layer number")
        need(list(self.layers) == sorted(set(self.layers)), "layer numbers repeat or are not ascending")
        need(len(self.expert_bytes) == len(self.layers) == len(self.residency), "one entry a MoE layer is needed")
        need(len(self.reads) in (0, len(self.layers)), "reads: one entry a MoE layer is needed")
        for row in self.reads:
            need(len(row) == self.num_experts, f"reads has {len(row)} experts of {self.num_experts}")
            for node in row:
                check_whole(node, 0, len(self.nodes) - 1, "a node that reads")
        for size in self.expert_bytes:
            check_whole(size, 1, 1 << 50, "expert_bytes")
        need(0 < len(self.nodes) <= MAX_NODES, f"{len(self.nodes)} nodes")
        for node in self.nodes:
            node.check()
        names = [n.name for n in self.nodes]
        need(len(set(names)) == len(names), "two nodes have the same name")
        need(len(self.slots) == len(self.nodes), "one row of slots a node is needed")
        for row in self.slots:
            need(len(row) == len(self.layers), "one number of slots a MoE layer is needed")
            for slots in row:
                check_whole(slots, 0, self.num_experts, "a number of slots")
        for prediction in (self.predicted, *self.baselines.values()):
            if prediction is not None:
                prediction.check()
        for key in ("lower_bound_s", "gap"):
            if (value := getattr(self, key)) is not None:
                check_figure(value, key)


def _rebuild(raw: dict) -> Plan:
    unknown = sorted(set(raw) - set(Plan.__dataclass_fields__))
    if unknown:
        raise PlanViolation(f"the plan has unknown fields {unknown}")
    predicted = raw["predicted"]
    return Plan(
        version=raw["version"],
        fingerprint=raw["fingerprint"],
        num_experts=raw["num_experts"],
        top_k=raw["top_k"],
        layers=tuple(raw["layers"]),
        expert_bytes=tuple(raw["expert_bytes"]),
        nodes=tuple(Node(**n) for n in raw["nodes"]),
        residency=tuple(tuple(tuple(holders) for holders in row) for row in raw["residency"]),
        slots=tuple(tuple(row) for row in raw["slots"]),
        reads=tuple(tuple(row) for row in raw.get("reads", ())),
        predicted=None if predicted is None else _prediction(predicted),
        baselines={str(k): _prediction(v) for k, v in raw["baselines"].items()},
        lower_bound_s=raw["lower_bound_s"],
        gap=raw["gap"],
        advice=tuple(str(a) for a in raw["advice"]),
    )


def _prediction(raw: dict) -> Prediction:
    fields = dict(raw)
    fields["tokens_per_s"] = tuple((rows, rate) for rows, rate in raw["tokens_per_s"])
    return Prediction(**fields)


def _no_constant(name: str) -> float:
    raise PlanViolation(f"the plan contains {name}", "every figure must be a finite number")
