"""Problems to measure the solver on: shapes of real checkpoints and small random instances. Knows no solver."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from titan.placement.problem import Problem
from titan.placement.routing import zipf_layers
from titan.placement.shapes import Shape, find_shape, shape_problem
from titan.placement.values import Node

SSD_BYTES_S = 5e9
MEMORY_BYTES_S = 400e9
ROUND_TRIPS_S = {"slow": 5e-4, "fast": 5e-5}
TOTALS = {"fits": 1.0, "tight": 0.8, "spare": 1.3}


def cluster(
    shape: Shape,
    nodes: int,
    *,
    home: float = 0.4,
    total: float = 1.0,
    round_trip_s: float = 5e-4,
    uneven: bool = False,
) -> tuple[Node, ...]:
    """A coordinator and workers that hold `total` of the model's experts, `home` of them on the coordinator.

    An expert's time is its bytes at 400 GB/s; one is read at 5 GB/s, four readers help. `uneven` varies the workers'
    speed by 0.5 to 3 and their round trip by 0.8 to 3.
    """
    size, experts = shape.expert_bytes, shape.moe_layers * shape.num_experts
    compute_s = 1e-5 + size / MEMORY_BYTES_S
    out = [Node("home", int(experts * home) * size, compute_s, ssd_s=size / SSD_BYTES_S, readers=4)]
    share = max(0.0, total - home) / max(1, nodes - 1)
    for i in range(nodes - 1):
        slow = (1, 2, 0.7, 1.5, 3, 0.5, 1.2)[i % 7] if uneven else 1
        far = (1, 1.4, 3, 1, 0.8, 2, 1.1)[i % 7] if uneven else 1
        memory = (int(experts * share) + 1) * size
        out.append(Node(f"w{i + 1}", memory, compute_s * slow, round_trip_s=round_trip_s * far))
    return tuple(out)


def shape_case(shape: Shape, nodes: tuple[Node, ...], zipf: float) -> Problem:
    """The problem of a real shape; `zipf` 0 is flat routing. Every layer has its own order of frequencies."""
    frequencies = None
    if zipf:
        frequencies = zipf_layers(shape.moe_layers, shape.num_experts, shape.top_k, zipf)
    return shape_problem(shape, nodes, frequencies=frequencies)


@dataclass(frozen=True, slots=True)
class Case:
    """What a problem was made from: memory `fits`, is `tight` (80 %) or `spare` (130 %); links `slow` or `fast`."""

    shape: str
    nodes: int
    zipf: float
    workers: str
    link: str
    memory: str


def cases(
    shapes: str,
    nodes: str,
    skews: str,
    *,
    workers: Sequence[str] = ("even",),
    links: Sequence[str] = ("slow",),
    memory: Sequence[str] = ("fits",),
) -> Iterator[tuple[Case, Problem]]:
    """Problems for every combination; `shapes`, `nodes` and `skews` are comma-separated."""
    for name in shapes.split(","):
        shape = find_shape(name)
        for parts in itertools.product(
            map(int, nodes.split(",")), map(float, skews.split(",")), workers, links, memory
        ):
            case = Case(shape.name, *parts)
            made = cluster(
                shape,
                case.nodes,
                total=TOTALS[case.memory],
                round_trip_s=ROUND_TRIPS_S[case.link],
                uneven=case.workers == "uneven",
            )
            yield case, shape_case(shape, made, case.zipf)


def equal_layers(
    nodes: Sequence[Node],
    layers: int,
    experts: int,
    top_k: int,
    *,
    sync_s: float = 2e-5,
    frequencies: tuple[tuple[float, ...], ...] | None = None,
    batch_rows: tuple[int, ...] = (1,),
) -> Problem:
    """A problem of equal layers whose experts take one byte each, so that memory counts experts."""
    return Problem(
        fingerprint="0" * 64,
        layers=tuple(range(layers)),
        expert_bytes=(1,) * layers,
        num_experts=experts,
        top_k=top_k,
        attention_s=(5e-5,) * layers,
        nodes=tuple(nodes),
        sync_s=sync_s,
        frequencies=frequencies,
        batch_rows=batch_rows,
    )


def small_case(seed: int, *, flat: bool) -> Problem:
    """A random instance: up to 4 layers x 16 experts x 3 nodes (flat), or 3 x 8 x 3 with skewed frequencies."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 5 if flat else 4))
    experts = int(rng.integers(6, 17)) if flat else int(rng.integers(5, 9))
    top_k = int(rng.integers(1, 5)) if flat else 2
    workers = int(rng.integers(1, 3))
    scale = float(rng.choice([2.0, 10.0, 25.0]))
    wanted = layers * experts
    home = max(layers * top_k, int(wanted * rng.uniform(0.2, 0.7)))
    readers = int(rng.choice([1, 4]))
    nodes = [Node("home", home, 20e-6, 5e-6, ssd_s=float(rng.choice([1e-4, 1e-3, 5e-3])), readers=readers)]
    for i in range(workers):
        memory = int(wanted * rng.uniform(0.1, 0.7))
        speed = 20e-6 * float(rng.choice([0.5, 1.0, 2.0]))
        nodes.append(Node(f"w{i + 1}", memory, speed, round_trip_s=20e-6 * scale * float(rng.uniform(0.5, 1.5))))
    frequencies = None
    if not flat:
        frequencies = zipf_layers(layers, experts, top_k, float(rng.uniform(0.2, 1.2)), seed)
    return equal_layers(nodes, layers, experts, top_k, frequencies=frequencies)
