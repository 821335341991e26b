"""Eviction policies by the names that options use."""

from __future__ import annotations

from titan.common.slots.forecast import Forecast
from titan.common.slots.policy import LFU, LRU, EvictionPolicy

__all__ = ["POLICIES", "make_policy"]

POLICIES = ("lru", "lfu", "forecast")


def make_policy(name: str, num_experts: int) -> EvictionPolicy:
    """A fresh policy for one layer of `num_experts` experts; KeyError when there is none of that name."""
    if name == "lru":
        return LRU()
    if name == "lfu":
        return LFU()
    if name == "forecast":
        return Forecast(num_experts)
    raise KeyError(name)
