"""The forecast policy: it learns successors, and beats recency where routing has a structure."""

from __future__ import annotations

import numpy as np

from titan.common.prediction.replay import replay
from titan.common.slots import Forecast, make_policy
from titan.common.slots.forecast import HORIZON, Choices, Foresight


def test_foresight_learns_the_discounted_share_of_what_follows() -> None:
    foresight = Foresight(4)
    for step in range(3000):
        foresight.observe([step % 3], [])
    found = 1 / (1 + np.exp(-foresight.logits()))  # 2 was the last: 0 comes next, then 1, then 2
    weights = 0.6 ** np.arange(HORIZON)
    expected = [weights[first::3].sum() / weights.sum() for first in (0, 1, 2)]
    np.testing.assert_allclose(found[:3], expected, atol=0.03)
    assert found[3] < 0.03


def test_foresight_uses_what_the_layers_before_chose() -> None:
    random = np.random.default_rng(1)
    choices = Choices(2)
    first, second = (Forecast(8, choices=choices, position=i) for i in (0, 1))
    coming = 0
    for _ in range(4000):  # layer 0 tells what layer 1 will choose at the token after
        second_choice, coming = coming, int(random.integers(0, 4))
        first.selected([4 + coming])
        second.selected([second_choice])
    first.selected([4 + 2])
    second.selected([coming])
    assert second.foresight.logits()[:4].argmax() == 2
    alone = Forecast(8)
    alone.selected([1])
    assert not alone.foresight.logits().any()


def test_nothing_is_learned_across_a_prompt_and_from_no_token_before_its_future_is_known() -> None:
    foresight = Foresight(4)
    for step in range(HORIZON):
        foresight.observe([step % 4], [])
    assert not foresight.weights.any()
    foresight.observe([0], [])
    learned = foresight.weights.copy()
    assert learned.any()
    foresight.forget_context()
    for step in range(HORIZON):
        foresight.observe([step % 4], [])
    np.testing.assert_array_equal(foresight.weights, learned)


def test_it_keeps_what_is_likely_next() -> None:
    policy = Forecast(4)
    for _ in range(200):
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
    assert not policy.foresight.steps[0]
    assert policy.victim(()) == 3
