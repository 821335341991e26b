"""What a coordinator wants of a worker: experts to hold, and experts to read from the worker's own disk when asked.

Values and their arithmetic; knows no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from titan.common.errors import WireError, WorkerRefused
from titan.common.registry.shape import ModelShape
from titan.proto.titan.v1 import worker_pb2 as pb

NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Cache:
    """A layer's slots beside the pinned ones, and the experts that are read into them when they are asked for."""

    slots: int = 0
    experts: frozenset[int] = NONE


NO_CACHE = Cache()


@dataclass(frozen=True, slots=True)
class Share:
    """By the model's layer number: experts that stay in memory, and caches."""

    pinned: Mapping[int, frozenset[int]] = field(default_factory=dict)
    caches: Mapping[int, Cache] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        return sorted(self.pinned.keys() | self.caches.keys())

    @property
    def served(self) -> dict[int, frozenset[int]]:
        """Experts that are to be read when they are asked for."""
        return {layer: cache.experts for layer, cache in self.caches.items()}

    @property
    def experts(self) -> dict[int, frozenset[int]]:
        """All of them, pinned or not."""
        return {i: self.pinned.get(i, NONE) | self.caches.get(i, NO_CACHE).experts for i in self.layers}

    def slots(self, layer: int) -> int:
        """Slots that a layer needs, pinned and cache together."""
        return len(self.pinned.get(layer, NONE)) + self.caches.get(layer, NO_CACHE).slots


def read_share(assignment: pb.Assignment, shape: ModelShape) -> Share:
    """The checked share of an assignment.

    Raises:
        WorkerRefused: a layer or an expert that the model does not have.
        WireError: a cache without slots, or with more slots than experts.
    """
    pinned: dict[int, frozenset[int]] = {}
    for entry in assignment.residency:
        pinned[entry.layer] = pinned.get(entry.layer, NONE) | frozenset(entry.experts)
    caches: dict[int, Cache] = {}
    for entry in assignment.caches:
        if not 1 <= entry.slots <= shape.num_experts or not entry.experts:
            raise WireError(f"a cache of {entry.slots} slots for {len(entry.experts)} experts in layer {entry.layer}")
        caches[entry.layer] = Cache(entry.slots, frozenset(entry.experts))
    known = {spec.index for spec in shape.layers}
    for layer, experts in [*pinned.items(), *((layer, cache.experts) for layer, cache in caches.items())]:
        if layer not in known:
            raise WorkerRefused(f"the model has no experts in layer {layer}", "plan again for this model")
        if experts and max(experts) >= shape.num_experts:
            raise WorkerRefused(f"layer {layer} has no expert {max(experts)}", "plan again for this model")
    return Share({layer: experts for layer, experts in pinned.items() if experts}, caches)


def union(shares: Iterable[Share]) -> Share:
    """What serves all of them: every pinned expert, and of each layer the largest cache for everybody's experts."""
    pinned: dict[int, frozenset[int]] = {}
    caches: dict[int, Cache] = {}
    for share in shares:
        for layer, experts in share.pinned.items():
            pinned[layer] = pinned.get(layer, NONE) | experts
        for layer, cache in share.caches.items():
            other = caches.get(layer, NO_CACHE)
            caches[layer] = Cache(max(cache.slots, other.slots), cache.experts | other.experts)
    return Share(pinned, caches)
