"""Eviction order of the policies, and what a policy costs against Belady's rule in a trace of its own."""

from __future__ import annotations

import pytest

from titan.common.slots import LFU, LRU, POLICIES, make_policy


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


@pytest.mark.parametrize("name", POLICIES)
def test_an_emptied_policy_knows_what_the_old_one_learned_and_holds_nothing(name: str) -> None:
    old = make_policy(name, 8)
    for chosen in [[0, 1], [0, 2]] * 20:
        old.selected(chosen)
        for expert in chosen:
            old.used(expert)
    new = old.emptied()
    assert new.victim(()) is None
    new.used(1)
    new.used(0)
    new.used(2)
    new.used(7)
    assert new.victim(()) == (1 if name == "lru" else 7), "it does not know who is used"
    assert old.victim({0, 2}) == 1, "the old one lost its experts"
