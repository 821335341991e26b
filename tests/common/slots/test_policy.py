"""Eviction order of the policies, and what a policy costs against Belady's rule in a trace of its own."""

from __future__ import annotations

from titan.common.slots import LFU, LRU


def test_lru_evicts_the_least_recently_used() -> None:
    policy = LRU()
    for expert in (1, 2, 3, 1):
        policy.used(expert)
    assert policy.victim(()) == 2
    assert policy.victim({2}) == 3
    policy.gone(2)
    assert policy.victim(()) == 3
    assert policy.victim({1, 3}) is None


def test_lfu_evicts_the_rarest_and_the_older_of_equals() -> None:
    policy = LFU()
    for expert in (1, 1, 2, 3, 3):
        policy.used(expert)
    assert policy.victim(()) == 2
    policy.gone(2)
    assert policy.victim(()) == 1


def test_lfu_remembers_counts_over_an_eviction() -> None:
    policy = LFU()
    for expert in (1, 1, 1, 2, 2):
        policy.used(expert)
    policy.gone(1)
    policy.used(1)
    assert policy.victim(()) == 2


def test_lfu_forgets_what_was_popular_long_ago() -> None:
    policy = LFU(decay_uses=8)
    for expert in [1] * 7 + [2, 2, 2]:
        policy.used(expert)
    for _ in range(20):
        policy.used(2)
        policy.used(3)
    assert policy.victim(()) == 1
