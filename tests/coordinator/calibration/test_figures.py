"""Measured times become figures; figures are kept whole or not at all.

Run: .venv/bin/pytest tests/coordinator/calibration
"""

from __future__ import annotations

from pathlib import Path

import pytest

from titan.common.registry import open_checkpoint
from titan.common.store import ExpertStore
from titan.coordinator.calibration.figures import (
    figures_key,
    home_figures,
    keep_figures,
    load_figures,
    with_asking,
    worker_figures,
)
from titan.coordinator.calibration.local import LocalFigures, measure_local
from titan.coordinator.calibration.remote import MANY_ROWS, RemoteFigures
from titan.coordinator.calibration.timing import Measured, summarise
from titan.coordinator.host.model import load_host_model
from titan.deploy import DEMO_MODEL
from titan.placement.figures import Figures, HomeFigures, WorkerFigures


def steady(seconds: float) -> Measured:
    return Measured(seconds, 0.05, 15)


def test_a_layer_inside_a_step_costs_what_the_step_says() -> None:
    local = LocalFigures(
        attention_s=steady(4e-4),
        sync_s=3e-5,
        whole_layer_s=150e-6,
        compute=((1, steady(70e-6)), (4, steady(160e-6)), (16, steady(520e-6))),
        page_cache_s=steady(3e-5),
        ssd_s=steady(1e-4),
        readers=2,
    )
    home = home_figures(local, top_k=4)
    assert home.compute_fixed_s + 4 * home.compute_s == pytest.approx(150e-6)
    assert home.compute_s == pytest.approx(30e-6, rel=0.1)
    assert (home.sync_s, home.readers, home.attention_s) == (3e-5, 2, 4e-4)


def test_bandwidth_shows_only_where_it_limits() -> None:
    line = ((1, steady(520e-6)), (4, steady(580e-6)))
    fast = worker_figures("a:1", RemoteFigures(line, steady(500e-6 + MANY_ROWS * 20e-6)), 8192)
    assert fast.bandwidth_bytes_s is None
    assert fast.round_trip_s == pytest.approx(500e-6)
    assert fast.compute_s == pytest.approx(20e-6)
    moved = 2 * MANY_ROWS * 8192
    slow = worker_figures("a:1", RemoteFigures(line, steady(500e-6 + MANY_ROWS * 20e-6 + moved / 10e6)), 8192)
    assert slow.bandwidth_bytes_s == pytest.approx(10e6)


def test_asking_several_workers_costs_what_it_took() -> None:
    near = WorkerFigures("a:1", 20e-6, 400e-6, None, 0.1)
    far = WorkerFigures("b:1", 20e-6, 900e-6, None, 0.1)
    both = with_asking({"near": near, "far": far}, pairs=2, together_s=1100e-6)
    assert both["far"].round_trip_s == pytest.approx(900e-6 + 160e-6)
    assert both["near"].round_trip_s == pytest.approx(400e-6 + 160e-6)
    assert with_asking({"near": near, "far": far}, pairs=2, together_s=800e-6) == {"near": near, "far": far}


def test_noise_is_measured_longer_and_flagged() -> None:
    turns = iter([1e-6, 9e-6] * 1000)
    noisy = summarise(lambda: next(turns), samples=5, budget_s=0.01)
    assert noisy.noisy
    assert noisy.samples > 5
    calm = summarise(lambda: 5e-6, samples=5, budget_s=0.01)
    assert (calm.noisy, calm.samples, calm.median_s) == (False, 5, 5e-6)


def test_figures_are_kept_by_what_they_are_good_for(tmp_path: Path) -> None:
    shape = open_checkpoint(DEMO_MODEL).shape
    key = figures_key(shape, "float32", {"mini": "10.0.0.2:7077"})
    assert key != figures_key(shape, "float32", {"mini": "10.0.0.3:7077"})
    assert key != figures_key(shape, "bfloat16", {"mini": "10.0.0.2:7077"})
    figures = Figures(key, HomeFigures(4e-4, 1e-5, 3e-5, 2e-5, 1.5e-4, 3e-5, 4, 0.1), {})
    assert load_figures(tmp_path, key) is None
    keep_figures(tmp_path / "new", figures)
    assert load_figures(tmp_path / "new", key) == figures
    assert len(list((tmp_path / "new").iterdir())) == 1, "a temporary file was left"
    (tmp_path / "new" / f"figures-{key}.json").write_text('{"version": 1, "key"')
    assert load_figures(tmp_path / "new", key) is None
    keep_figures(Path("/proc/cannot-be-made"), figures)  # logged, no error


def test_the_demo_models_figures_are_plausible() -> None:
    checkpoint = open_checkpoint(DEMO_MODEL)
    store = ExpertStore(checkpoint)
    phases: list[str] = []
    try:
        local = measure_local(checkpoint, store, load_host_model(checkpoint, "float32"), "float32", phases.append)
    finally:
        store.close()
    assert len(phases) == 3
    pairs = [p for p, _ in local.compute]
    assert pairs == sorted(pairs)
    assert {1, 4}.issubset(pairs)
    assert all(m.median_s > 0 for _, m in local.compute)
    home = home_figures(local, top_k=4)
    assert 0 < home.attention_s < 1
    assert 0 < home.compute_s < 1
    assert 0 < home.page_cache_s < 1
    assert home.readers >= 1
