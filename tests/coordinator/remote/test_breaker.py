"""Pauses grow with failures and shrink with time served.

Run: .venv/bin/pytest tests/coordinator/remote/test_breaker.py
"""

from __future__ import annotations

import pytest

from titan.coordinator.remote.breaker import Breaker


def middle() -> float:
    return 0.5


def test_states() -> None:
    breaker = Breaker(1.0, 30.0, middle)
    assert breaker.state == "probing"
    breaker.close()
    assert breaker.state == "closed"
    breaker.open(0.0)
    assert breaker.state == "open"
    breaker.probe()
    assert breaker.state == "probing"


def test_pauses_double_up_to_the_longest() -> None:
    breaker = Breaker(1.0, 30.0, middle)
    assert [breaker.open(0.0) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_worker_that_flaps_is_held_out_longer_each_time() -> None:
    breaker = Breaker(1.0, 30.0, middle)
    pauses = []
    for _ in range(5):
        breaker.probe()
        breaker.close()
        pauses.append(breaker.open(served_s=0.5))
    assert pauses == sorted(pauses)
    assert pauses[-1] == 16 * pauses[0]


def test_serving_long_is_forgiven() -> None:
    breaker = Breaker(1.0, 30.0, middle)
    for _ in range(5):
        breaker.open(0.0)
    assert breaker.open(served_s=3600.0) == 1.0


def test_serving_for_a_while_forgives_part() -> None:
    breaker = Breaker(1.0, 30.0, middle)
    for _ in range(4):
        breaker.open(0.0)  # 8 s now
    assert breaker.open(served_s=33.0) == 8.0  # one forgiven by 32 s, one added
    assert breaker.open(served_s=31.0) == 16.0


def test_a_planned_absence_is_no_failure() -> None:
    breaker = Breaker(1.0, 30.0, middle)
    assert [breaker.open(0.0, planned=True) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(("draw", "pause"), [(0.0, 0.75), (0.999999, 1.25)])
def test_jitter_keeps_workers_from_coming_back_together(draw: float, pause: float) -> None:
    assert Breaker(1.0, 30.0, lambda: draw).open(0.0) == pytest.approx(pause, abs=1e-4)


def test_many_failures_do_not_overflow() -> None:
    breaker = Breaker(1.0, 30.0, middle)
    assert [breaker.open(0.0) for _ in range(2000)][-1] == 30.0
