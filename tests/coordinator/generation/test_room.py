"""Places in KV memory. Run: `.venv/bin/pytest tests/coordinator/generation/test_room.py`."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from titan.coordinator.generation.room import GROWTH_TOKENS, Need, peak_places

needs = st.lists(
    st.builds(
        lambda length, more, decoding: Need(length, length + more, decoding),
        st.integers(1, 600),
        st.integers(0, 600),
        st.booleans(),
    ),
    max_size=6,
)


def filled(sequences: list[tuple[int, int]]) -> int:
    return len(sequences) * (max((length for length, _ in sequences), default=0) + GROWTH_TOKENS - 1)


def simulated(given_needs: list[Need], draw: random.Random, *, early: bool) -> int:
    """The most places while all run, joining and (if `early`) ending when chance has it."""
    waiting = [need for need in given_needs if not need.decoding]
    running = [(need.length, need.final) for need in given_needs if need.decoding]
    peak = 0
    while waiting or running:
        present = [*running, *((need.length, need.final) for need in waiting)]
        peak = max(peak, filled(present))
        if waiting and (draw.random() < 0.01 or not running):
            need = waiting.pop(draw.randrange(len(waiting)))
            running.append((need.length, need.final))
        running = [(length + 1, final) for length, final in running if length < final]
        if early and running and draw.random() < 0.01:
            running.pop(draw.randrange(len(running)))
    return peak


@settings(max_examples=60, deadline=None)
@given(needs, st.integers(0, 2**32))
def test_no_course_of_events_fills_more(given_needs: list[Need], seed: int) -> None:
    assert simulated(given_needs, random.Random(seed), early=True) <= peak_places(given_needs)


@settings(max_examples=60, deadline=None)
@given(needs)
def test_what_decodes_already_is_counted_exactly(given_needs: list[Need]) -> None:
    decoding = [need for need in given_needs if need.decoding]
    assert simulated(decoding, random.Random(0), early=False) == peak_places(decoding)


def test_one_that_ends_soon_makes_room_for_the_end_of_another() -> None:
    assert peak_places([Need(900, 910, True), Need(10, 900, True)]) == 2 * (910 + GROWTH_TOKENS - 1)
    assert peak_places([Need(900, 910, True), Need(800, 1700, True)]) == 2 * (910 + GROWTH_TOKENS - 1)
    assert peak_places([]) == 0
