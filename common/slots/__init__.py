"""Slot tables: which experts are in memory, in which slot of a layer's stacked buffers, and who must go."""

from titan.common.slots.forecast import Forecast
from titan.common.slots.policies import POLICIES, make_policies, make_policy
from titan.common.slots.policy import LFU, LRU, EvictionPolicy
from titan.common.slots.table import SlotTable

__all__ = ["LFU", "LRU", "POLICIES", "EvictionPolicy", "Forecast", "SlotTable", "make_policies", "make_policy"]
