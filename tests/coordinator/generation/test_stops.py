"""Stop strings against a plain search. Run: `.venv/bin/pytest tests/coordinator/generation/test_stops.py`."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from titan.coordinator.generation.stops import StopFilter

small_text = st.text(alphabet="abé", max_size=30)
small_stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4).map(tuple)


def plain_search(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(text=small_text, stops=small_stops, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_equals_a_search_over_the_whole_text_however_it_is_cut(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(borders)]
    filtered = StopFilter(stops)
    passed = ""
    for piece in pieces:
        passed += filtered.push(piece)
        assert plain_search(text, stops)[0].startswith(passed)
    if not filtered.stopped:
        passed += filtered.flush()
    assert (passed, filtered.stopped) == plain_search(text, stops)


@given(text=small_text, stops=small_stops)
def test_holds_back_no_more_than_could_become_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    filtered = StopFilter(stops)
    filtered.push(text)
    if not filtered.stopped:
        held = text[len(text) - filtered.held_characters :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_text_after_the_stop_is_dropped() -> None:
    filtered = StopFilter(("\n\n",))
    assert filtered.push("one\n") == "one"
    assert filtered.push("\ntwo") == ""
    assert filtered.stopped
    assert filtered.push("three") == ""
    assert filtered.flush() == ""
