"""Prefetch against no prefetch by the clock: what saves is used, what does not sleeps, and longer each time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from titan.common.prefetch.worth import Worth


def serve(
    worth: Worth, steps: int, ratio: float, stall: float = 0.3, rows: Callable[[int], int] = lambda _: 1
) -> list[str]:
    """Noisy steps, `ratio` times as long with prefetch; the phase of each."""
    random = np.random.default_rng(3)
    phases = []
    for step in range(steps):
        phases.append(worth.phase)
        seconds = rows(step) * 5e-3 * float(random.lognormal(0, 0.1)) * (ratio if worth.reading else 1.0)
        worth.ended(seconds, stall * seconds, rows(step), promising=True)
    return phases


@pytest.mark.parametrize(("ratio", "used"), [(0.6, True), (0.85, True), (1.0, False), (1.15, False), (2.0, False)])
def test_what_makes_steps_shorter_is_used(ratio: float, used: bool) -> None:
    phases = serve(Worth(), 400, ratio)
    assert (phases[-1] == "using") == used
    assert phases[-1] in ("using", "asleep")


def test_a_loss_costs_few_steps() -> None:
    worth = Worth()
    phases = serve(worth, 5000, 1.5)
    assert phases.count("trying") <= 3 * 16
    assert phases.count("learning") <= 32 + 2 * 8
    assert "using" not in phases


def test_without_a_stall_nothing_is_tried() -> None:
    phases = serve(Worth(), 3000, 0.5, stall=0.01)
    assert set(phases) == {"learning", "asleep"}
    assert phases.count("learning") == 32, "it wakes though there is nothing to save"


def test_what_stops_paying_goes_to_sleep_and_is_tried_again_later() -> None:
    worth = Worth()
    assert serve(worth, 400, 0.7)[-1] == "using"
    assert serve(worth, 1100, 1.1)[-1] == "asleep"
    assert serve(worth, 2500, 0.7)[-1] == "using"


def test_steps_of_other_batches_do_not_count() -> None:
    assert serve(Worth(), 600, 0.7, rows=lambda step: 1 + step % 3)[-1] in ("trying", "using")
    assert serve(Worth(), 600, 1.5, rows=lambda step: 1 + step % 3)[-1] == "asleep"


def test_nothing_to_read_means_sleep() -> None:
    worth = Worth()
    for _ in range(32):
        worth.ended(1.0, 0.5, 1, promising=False)
    assert worth.phase == "asleep"
    assert not worth.looking
