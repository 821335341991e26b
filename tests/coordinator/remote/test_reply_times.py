"""Deadlines and hedges follow what a worker was measured to need, between a floor and a ceiling.

Run: .venv/bin/pytest tests/coordinator/remote/test_reply_times.py
"""

from __future__ import annotations

import numpy as np
import pytest

from titan.coordinator.remote.reply_times import ENOUGH, WINDOW, ReplyTimes


def measured(times_s: np.ndarray, *, execute_s: float = 0.5, pair_s: float = 1e-4, pairs: int = 8) -> ReplyTimes:
    replies = ReplyTimes(execute_s, pair_s)
    for seconds in times_s:
        replies.record(pairs, float(seconds))
    return replies


def test_before_anything_is_known_the_deadline_is_the_configured_one_and_nothing_is_hedged() -> None:
    replies = ReplyTimes(0.5, 1e-3)
    assert replies.deadline_s(10) == pytest.approx(0.5 + 0.1)
    assert replies.hedge_s(10, 0.001, 0.5) is None
    few = measured(np.full(ENOUGH - 1, 0.001))
    assert few.deadline_s(8) == pytest.approx(0.5 + 8e-3)


def test_a_fast_worker_gets_the_floor() -> None:
    assert measured(np.full(64, 0.0005)).deadline_s(8) == pytest.approx(0.125)


def test_a_slow_worker_gets_what_its_tail_needs_and_never_more_than_the_ceiling() -> None:
    rng = np.random.default_rng(1)
    times = rng.normal(0.1, 0.01, 200)
    deadline = measured(times, execute_s=0.5).deadline_s(8)
    assert 2 * times[-WINDOW:].max() <= deadline < 0.5
    assert measured(np.full(64, 3.0)).deadline_s(8) == pytest.approx(0.5 + 8e-3)


def test_larger_calls_do_not_inherit_the_deadline_of_small_ones() -> None:
    replies = measured(np.full(64, 0.0005), pair_s=1e-3)
    assert replies.deadline_s(1000) == pytest.approx(0.5 + 10.0)


def test_the_window_forgets() -> None:
    replies = measured(np.concatenate([np.full(64, 0.2), np.full(WINDOW + 8, 0.001)]))
    assert replies.deadline_s(8) == pytest.approx(0.125)


def test_a_hedge_waits_for_the_95th_percentile_and_as_long_as_local_execution_takes() -> None:
    times = np.full(64, 0.001)
    times[::16] = 0.004
    replies = measured(times)
    after = replies.hedge_s(8, 0.002, 0.125)
    assert after is not None
    assert after == pytest.approx(0.004 + 0.002, abs=1e-6)


def test_no_hedge_where_the_local_ssd_could_not_win() -> None:
    replies = measured(np.full(64, 0.001))
    assert replies.hedge_s(8, 0.2, 0.125) is None  # the deadline comes first
    assert replies.hedge_s(8, float("inf"), 0.125) is None
