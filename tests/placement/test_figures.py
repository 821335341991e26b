"""Lines through measured points, and figures that are kept.

Run: .venv/bin/pytest tests/placement/test_figures.py
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.common.errors import PlanError, TitanError
from titan.placement.figures import Figures, HomeFigures, WorkerFigures, fit_line

HOME = HomeFigures(4e-4, 1e-5, 3e-5, 2e-5, 1.5e-4, 3e-5, 4, 0.1)
WORKER = WorkerFigures("10.0.0.2:7077", 2e-5, 5e-4, None, 0.05)


@given(st.floats(1e-6, 1e-2), st.floats(0, 1e-2), st.lists(st.integers(1, 512), min_size=2, max_size=6, unique=True))
def test_exact_lines_are_found(slope: float, fixed: float, pairs: list[int]) -> None:
    found_slope, found_fixed = fit_line([(p, slope * p + fixed) for p in pairs])
    assert found_slope == pytest.approx(slope, rel=1e-4, abs=1e-9)
    assert found_fixed == pytest.approx(fixed, rel=1e-4, abs=1e-7)


def test_neither_part_is_negative() -> None:
    assert fit_line([(1, 1.0), (2, 2.5), (3, 4.0)])[1] == 0.0
    slope, fixed = fit_line([(1, 2.0), (10, 1.0)])
    assert slope == 0.0
    assert 1.0 <= fixed <= 2.0
    assert fit_line([(4, 2.0)]) == (0.5, 0.0)


def test_small_batches_weigh_as_much_as_large_ones() -> None:
    # 100 µs fixed; the large batch runs a little faster a pair than the small ones.
    _, fixed = fit_line([(1, 130e-6), (4, 220e-6), (512, 14e-3)])
    assert fixed == pytest.approx(100e-6, rel=0.1)


def test_kept_figures_come_back() -> None:
    for worker in (WORKER, replace(WORKER, ssd_s=2e-3, readers=3, ssd_spread=0.2)):
        figures = Figures("abc", HOME, {"mini": worker})
        assert Figures.from_json(figures.to_json()) == figures


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"version": 99}, "version"),
        ({"home": {"attention_s": 1}}, "cannot be read"),
        ({"workers": []}, "cannot be read"),
    ],
)
def test_other_figures_are_refused(change: dict, word: str) -> None:
    raw = json.loads(Figures("abc", HOME, {"mini": WORKER}).to_json()) | change
    with pytest.raises(PlanError, match=word):
        Figures.from_json(json.dumps(raw))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "much", None])
def test_figures_that_are_no_figures_are_refused(bad: object) -> None:
    raw = json.loads(Figures("abc", HOME, {"mini": WORKER}).to_json())
    raw["home"]["compute_s"] = bad
    with pytest.raises(PlanError):
        Figures.from_json(json.dumps(raw))
    raw = json.loads(Figures("abc", replace(HOME), {"mini": WORKER}).to_json())
    raw["workers"]["mini"]["round_trip_s"] = bad
    with pytest.raises(PlanError):
        Figures.from_json(json.dumps(raw))


@pytest.mark.parametrize(("name", "bad"), [("ssd_s", -1.0), ("ssd_s", "fast"), ("readers", 0), ("readers", 1.5)])
def test_a_disk_that_cannot_be_is_refused(name: str, bad: object) -> None:
    raw = json.loads(Figures("abc", HOME, {"mini": WORKER}).to_json())
    raw["workers"]["mini"][name] = bad
    with pytest.raises(PlanError, match=name):
        Figures.from_json(json.dumps(raw))


@given(st.text(max_size=400))
def test_any_text_is_refused_with_a_named_error(text: str) -> None:
    with pytest.raises(TitanError):
        Figures.from_json(text)
