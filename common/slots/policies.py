"""Eviction policies by the names that options use."""

from __future__ import annotations

from titan.common.slots.forecast import Choices, Forecast
from titan.common.slots.policy import LFU, LRU, EvictionPolicy

__all__ = ["POLICIES", "make_policies", "make_policy"]

POLICIES = ("lru", "lfu", "forecast")


def make_policy(name: str, num_experts: int) -> EvictionPolicy:
    """A fresh policy for one layer of `num_experts` experts; KeyError when there is none of that name."""
    return make_policies(name, num_experts, 1)[0]


def make_policies(name: str, num_experts: int, layers: int) -> list[EvictionPolicy]:
    """Fresh policies for the MoE layers of a model in the order they run, which know of one another.

    KeyError when there is none of that name.
    """
    if name == "lru":
        return [LRU() for _ in range(layers)]
    if name == "lfu":
        return [LFU() for _ in range(layers)]
    if name == "forecast":
        choices = Choices(layers)
        return [Forecast(num_experts, choices=choices, position=i) for i in range(layers)]
    raise KeyError(name)
