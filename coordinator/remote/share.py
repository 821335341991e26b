"""What a worker is given: experts it keeps in memory, and caches for experts it reads from its own disk. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cache:
    """A layer's slots beside the pinned ones, and the experts that are read into them when they are asked for."""

    slots: int
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """By the model's layer number. Two of them are the same only if they are one."""

    pinned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    caches: Mapping[int, Cache] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.pinned or self.caches)

    @property
    def held(self) -> dict[int, frozenset[int]]:
        return {layer: frozenset(experts) for layer, experts in self.pinned.items()}

    @property
    def served(self) -> dict[int, frozenset[int]]:
        return {layer: frozenset(cache.experts) for layer, cache in self.caches.items()}

    @property
    def example(self) -> tuple[int, tuple[int, ...]]:
        """A layer and experts that the worker can be asked for there, if possible without a read."""
        if self.pinned:
            return next(iter(self.pinned.items()))
        layer, cache = next(iter(self.caches.items()))
        return layer, cache.experts[: cache.slots]

    def serving(self, served: Mapping[int, frozenset[int]]) -> Share:
        """The same with those experts only, of the ones that are read, that a worker says it serves."""
        caches = {
            i: Cache(cache.slots, tuple(e for e in cache.experts if e in served.get(i, ())))
            for i, cache in self.caches.items()
        }
        return Share(self.pinned, {i: cache for i, cache in caches.items() if cache.experts})

    def slots(self, layer: int) -> int:
        cache = self.caches.get(layer)
        return len(self.pinned.get(layer, ())) + (cache.slots if cache is not None else 0)
