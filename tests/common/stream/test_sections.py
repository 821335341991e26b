"""Sections cover what is missing once, fit, bridge small holes only; the cheaper way is taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from titan.common.stream.rates import LOOK_AGAIN, ReadRates
from titan.common.stream.sections import BRIDGE_BYTES, last_chosen, sections

EXPERT_BYTES = BRIDGE_BYTES // 3


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 64), st.sampled_from([1, EXPERT_BYTES, 1 << 22]))
def test_sections_cover_the_missing_once(missing: set[int], width: int, expert_bytes: int) -> None:
    found = sections(missing, width, expert_bytes)
    read = [e for section in found for e in section]
    assert read == sorted(set(read))
    assert missing <= set(read)
    assert all(0 < len(section) <= width for section in found)
    assert len(found) <= len(missing)
    if expert_bytes > BRIDGE_BYTES:
        assert set(read) == missing


def test_small_holes_are_read_over() -> None:
    assert sections([0, 4, 9], 8, EXPERT_BYTES) == [[0, 1, 2, 3, 4, 9]]  # a hole of three, one of four
    assert sections([9, 0, 2], 2, EXPERT_BYTES) == [[0, 2], [9]]


def test_the_last_chosen() -> None:
    assert last_chosen(reversed([5, 1, 2, 1, 3, 2]), 3) == [2, 3, 1]
    assert last_chosen([], 3) == []


def test_the_cheaper_way_is_taken_and_the_other_looked_at_again() -> None:
    rates = ReadRates()
    assert rates.sequential_pays(10, 10)  # never measured
    rates.read_sequentially(8, 8e-3)
    assert not rates.sequential_pays(10, 10)  # the other was never measured
    rates.read_scattered(4, 6e-3)
    choices = [rates.sequential_pays(10, 12) for _ in range(LOOK_AGAIN)]
    assert choices.count(False) == 1
    assert not any(rates.sequential_pays(10, 16) for _ in range(LOOK_AGAIN // 2))  # too many holes
    for _ in range(20):
        rates.read_scattered(4, 2e-3)
    assert not rates.sequential_pays(10, 10)
