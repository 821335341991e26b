"""The forecast policy: it learns successors, and beats recency where routing has a structure."""

from __future__ import annotations

import numpy as np

from titan.common.prediction.replay import replay
from titan.common.slots import Forecast, make_policy
from titan.common.slots.forecast import Successors


def test_successors_are_discounted_counts() -> None:
    successors = Successors(4)
    for expert in (0, 1, 2, 0, 1):
        successors.observe([expert])
    # after 0: 1 follows at once, twice; 2 one token later; 0 itself after three tokens
    np.testing.assert_allclose(successors.counts[0], [0.25, 2 + 0.125, 0.5, 0])
    assert successors.uses.tolist() == [2, 2, 1, 0]
    likelihood = successors.likelihood([0])
    assert likelihood.argmax() == 1
    assert likelihood.argmin() == 3


def test_it_keeps_what_is_likely_next() -> None:
    policy = Forecast(4)
    for _ in range(20):
        for expert in (0, 1, 0, 2):
            policy.selected([expert])
            policy.used(expert)
    policy.selected([1])  # 0 always follows 1; 2 comes after that
    assert policy.victim({1, 0}) == 2
    assert policy.victim({1}) == 2
    policy.gone(2)
    assert policy.victim({0, 1}) is None


def test_it_beats_lru_where_tokens_follow_one_another() -> None:
    random = np.random.default_rng(0)
    follows = [random.permutation(16)[:4] for _ in range(16)]
    ids = np.zeros((3000, 1, 2), np.int64)
    state = 0
    for token in range(len(ids)):
        state = int(random.choice(follows[state]))
        ids[token, 0] = [state, (state + 5) % 16]
    rates = {name: replay(ids, 5, [make_policy(name, 16)], warm=1000).hit_rate for name in ("lru", "forecast")}
    assert rates["forecast"] > rates["lru"] + 0.05


def test_a_prompts_many_rows_teach_nothing() -> None:
    policy = Forecast(8)
    policy.selected(range(8))
    policy.used(3)
    assert not policy.successors.steps[0]
    assert policy.victim(()) == 3
