"""Predictors on routing whose structure is known, their scores counted by hand, and their state on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from titan.common.prediction import Oracle, PredictionScore, Predictor, PreviousToken, Probe, Routing, Transition
from titan.common.prediction.replay import replay
from titan.common.prediction.state import load_state, save_state
from titan.common.slots import LRU, make_policy

LAYERS, EXPERTS, TOP_K = 4, 16, 2


def chained(tokens: int, seed: int = 0) -> np.ndarray:
    """[tokens, layers, K]: layer 0 is random, every later layer follows from the one before by a fixed permutation."""
    random = np.random.default_rng(seed)
    steps = [random.permutation(EXPERTS) for _ in range(LAYERS)]
    ids = np.zeros((tokens, LAYERS, TOP_K), np.int64)
    for token in range(tokens):
        ids[token, 0] = random.permutation(EXPERTS)[:TOP_K]
        for layer in range(1, LAYERS):
            ids[token, layer] = steps[layer][ids[token, layer - 1]]
    return ids


def run(predictor: Predictor, ids: np.ndarray, probes: np.ndarray | None = None) -> PredictionScore:
    policies = [LRU() for _ in range(LAYERS)]
    return replay(ids, 4, policies, predictor, probes=probes, warm=len(ids) // 2).score


def test_the_transition_learns_what_follows_at_its_depth() -> None:
    ids = chained(400)
    one = run(Transition(LAYERS, EXPERTS, 1), ids)
    assert one.recall(TOP_K) > 0.7  # 3 of 4 layers follow, layer 0 is a new draw
    assert 0.28 < run(Transition(LAYERS, EXPERTS, 3), ids).recall(TOP_K) < 0.45  # 1 of 4 follows
    assert run(Transition(LAYERS, EXPERTS, LAYERS), ids).recall(TOP_K) < 0.25  # tokens are independent
    with pytest.raises(ValueError, match="5 of 4"):
        Transition(LAYERS, EXPERTS, 5)


def test_the_previous_token_repeats() -> None:
    ids = np.tile(chained(1), (20, 1, 1))
    assert run(PreviousToken(LAYERS), ids).recall(TOP_K) == 1.0
    ranked = PreviousToken(LAYERS)
    ranked.observe(2, Routing([3, 1], np.array([0.1, 0.5, 0.05, 0.35])))
    assert ranked.rank(2).tolist() == [1, 3, 0, 2]
    assert ranked.rank(1).size == 0


def test_the_probe_ranks_by_the_logits_of_the_layer_ahead() -> None:
    ids = chained(20)
    probes = np.zeros((20, LAYERS, EXPERTS))
    for token in range(20):
        for layer in range(LAYERS - 1):
            probes[token, layer, ids[token, layer + 1]] = 1
    score = run(Probe(LAYERS), ids, probes)
    assert score.recall(TOP_K) > 0.75
    assert Probe(LAYERS).rank(0).size == 0


def test_the_oracle_knows() -> None:
    ids = chained(50)
    policies = [LRU() for _ in range(LAYERS)]
    result = replay(ids, 4, policies, Oracle(ids), prefetch=TOP_K, warm=1)
    assert result.hit_rate == 1.0
    assert result.score.recall(TOP_K) == result.score.precision(TOP_K) == 1.0
    assert replay(ids, 4, [LRU() for _ in range(LAYERS)], warm=1).hit_rate < 0.5


def test_scores_are_what_they_are_defined_to_be() -> None:
    score = PredictionScore(4)
    score.add(predicted=[1, 2, 3], absent=[2, 3], chosen={2, 5}, would_miss={2, 5})
    score.add(predicted=[7], absent=[], chosen={7, 8}, would_miss={8})
    assert score.recall(3) == 2 / 4  # 2 and 7 of 2, 5, 7, 8
    assert score.precision(3) == 2 / 4  # of 1, 2, 3, 7
    assert score.recall_of_misses(2) == 1 / 3  # 2 of 2, 5, 8
    assert score.chances().tolist() == [0.5, 0.0, 0.0, 0.0]  # (1 of 1, one more against it), (0 of 1)
    score.decay(0.5)
    assert score.recall(3) == 2 / 4


@pytest.mark.parametrize("policy", ["lru", "lfu", "forecast"])
def test_a_prefetch_in_the_replay_never_makes_a_table_too_full(policy: str) -> None:
    ids = chained(200, seed=3)
    policies = [make_policy(policy, EXPERTS) for _ in range(LAYERS)]
    result = replay(ids, TOP_K, policies, Transition(LAYERS, EXPERTS), prefetch=4)
    assert 0 < result.hit_rate < 1
    assert result.loads_per_step >= result.misses_per_step


def test_state_comes_back_and_only_for_its_model(tmp_path: Path) -> None:
    path = tmp_path / "state" / "routing.npz"
    counts = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert load_state(path, "a", {"counts": (3, 4)}) is None
    save_state(path, "a", {"counts": counts})
    found = load_state(path, "a", {"counts": (3, 4)})
    assert found is not None
    np.testing.assert_array_equal(found["counts"], counts)
    assert load_state(path, "b", {"counts": (3, 4)}) is None
    assert load_state(path, "a", {"counts": (4, 4)}) is None
    assert load_state(path, "a", {"other": (3, 4)}) is None
    save_state(path, "a", {"counts": np.full((3, 4), np.nan)})
    assert load_state(path, "a", {"counts": (3, 4)}) is None
    path.write_bytes(path.read_bytes()[:100])
    assert load_state(path, "a", {"counts": (3, 4)}) is None
    assert [p.name for p in path.parent.iterdir()] == ["routing.npz"]
