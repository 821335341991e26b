"""Naive placements to compare with. Each is an arrangement within the same memory rules; none knows costs."""

from __future__ import annotations

import zlib

import numpy as np

from titan.placement.evaluate import MISS, Floats, Ints
from titan.placement.problem import Problem

NAMES = ("hash", "round_robin", "memory_layers", "frequency_greedy", "one_node")


def baseline(name: str, problem: Problem, weights: list[Floats]) -> Ints:
    """The arrangement of a naive placement [layers, experts].

    hash: a hash of (layer, expert) names the node; round_robin: experts go to the nodes in turn; memory_layers: whole
    layers to nodes in proportion to their memory; frequency_greedy: the most frequent experts to node 0, the next to
    the workers in order of round trip; one_node: node 0 and its SSD alone. What finds no room on its node goes to the
    next node with room, then to node 0's SSD. Every layer keeps top-k local slots.
    """
    room = _Room(problem)
    layers, experts, nodes = len(problem.layers), problem.num_experts, len(problem.nodes)
    if name == "frequency_greedy":
        _by_frequency(problem, room, weights)
    elif name == "memory_layers":
        total = sum(n.memory_bytes for n in problem.nodes)
        edges = np.cumsum([n.memory_bytes / total for n in problem.nodes]) * layers
        for layer in range(layers):
            node = min(int(np.searchsorted(edges, layer + 0.5)), nodes - 1)
            for expert in range(experts):
                room.put(layer, expert, node)
    elif name == "one_node":
        for layer in range(layers):
            for expert in np.argsort(-weights[layer], kind="stable").tolist():
                room.put(layer, expert, 0, spill=False)
    elif name in ("hash", "round_robin"):
        for layer in range(layers):
            for expert in range(experts):
                number = layer * experts + expert
                node = zlib.crc32(f"{layer}/{expert}".encode()) if name == "hash" else number
                room.put(layer, expert, node % nodes)
    else:
        raise KeyError(name)
    return room.finish(weights)


def _by_frequency(problem: Problem, room: _Room, weights: list[Floats]) -> None:
    order = [(0, n) for n in range(1)] + sorted((n.round_trip_s, i) for i, n in enumerate(problem.nodes) if i)
    all_weights = np.concatenate(weights)
    experts = problem.num_experts
    for flat in np.argsort(-all_weights, kind="stable").tolist():
        for _, node in order:
            if room.put(flat // experts, flat % experts, node, spill=False):
                break


class _Room:
    """Free bytes of the nodes while an arrangement is filled; node 0 keeps top-k slots a layer."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.keep = min(problem.top_k, problem.num_experts)
        self.place = np.full((len(problem.layers), problem.num_experts), MISS, dtype=np.int64)
        self.local = [0] * len(problem.layers)
        self.free = [n.memory_bytes for n in problem.nodes]
        self.free[0] -= sum(problem.expert_bytes) * self.keep

    def put(self, layer: int, expert: int, node: int, *, spill: bool = True) -> bool:
        size, nodes = self.problem.expert_bytes[layer], len(self.free)
        for step in range(nodes if spill else 1):
            at = (node + step) % nodes
            if at == 0 and self.local[layer] < self.keep:
                self.local[layer] += 1
            elif self.free[at] >= size:
                self.free[at] -= size
                self.local[layer] += at == 0
            else:
                continue
            self.place[layer, expert] = at
            return True
        return False

    def finish(self, weights: list[Floats]) -> Ints:
        """Local slots that every layer has anyway take experts that would be misses."""
        for layer, row in enumerate(self.place):
            lost = np.flatnonzero(row == MISS)
            ranked = lost[np.argsort(-weights[layer][lost], kind="stable")]
            row[ranked[: max(0, self.keep - self.local[layer])]] = 0
        return self.place
