"""Experts that no node holds: which node reads them from its own disk when they are selected.

They are dealt out in proportion to the cache slots that the nodes have in the layer, so that every disk and every cache
has its part. Node 0 can read any of them besides. It knows counts, not disks.
"""

from __future__ import annotations

from collections.abc import Sequence


def deal(experts: Sequence[int], cache_slots: Sequence[int]) -> list[tuple[int, ...]]:
    """Experts by node, in their order. `cache_slots`: of each node in this layer; without any, node 0 gets them all."""
    total = sum(cache_slots)
    dealt: list[list[int]] = [[] for _ in cache_slots]
    for done, expert in enumerate(experts, start=1):
        owed = [slots * done - total * len(mine) for slots, mine in zip(cache_slots, dealt, strict=True)]
        dealt[owed.index(max(owed))].append(expert)
    return [tuple(mine) for mine in dealt]
