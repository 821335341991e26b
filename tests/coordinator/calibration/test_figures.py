"""Measured times become figures; figures are kept whole or not at all.

Run: .venv/bin/pytest tests/coordinator/calibration
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan.common.registry import open_checkpoint
from titan.common.store import ExpertStore, ReaderPool
from titan.coordinator.calibration.figures import (
    figures_key,
    home_figures,
    keep_figures,
    load_figures,
    with_sharing,
    worker_figures,
)
from titan.coordinator.calibration.local import LocalFigures, measure_local, scratch_layer
from titan.coordinator.calibration.remote import RemoteFigures
from titan.coordinator.calibration.steps import DecodeSteps
from titan.coordinator.calibration.timing import (
    MOST_ROUNDS,
    QUIET_CORES,
    Measured,
    OtherWork,
    quiet_rounds,
    summarise,
)
from titan.coordinator.host.model import load_host_model
from titan.deploy import DEMO_MODEL
from titan.placement.figures import Figures, HomeFigures, WorkerFigures


def steady(seconds: float) -> Measured:
    return Measured(seconds, 0.05, 15)


def local(**changes: Any) -> LocalFigures:
    figures = LocalFigures(
        without=steady(8 * 4e-4),
        layers=8,
        asked=steady(8 * (4e-4 + 180e-6)),
        answered=steady(8 * (4e-4 + 150e-6)),
        compute=((1, steady(70e-6)), (4, steady(160e-6)), (16, steady(520e-6))),
        page_cache=steady(3e-5),
        ssd=steady(1e-4),
        readers=1,
        missed=steady(8 * (4e-4 + 180e-6 + 2 * 50e-6)),
        misses=2,
    )
    return replace(figures, **changes)


def test_a_layer_inside_a_step_costs_what_the_step_says() -> None:
    home = home_figures(local(), top_k=4)
    assert home.compute_fixed_s + 4 * home.compute_s == pytest.approx(150e-6)
    assert home.compute_s == pytest.approx(30e-6, rel=0.1)
    assert home.attention_s == pytest.approx(4e-4)
    assert home.sync_s == pytest.approx(30e-6)
    quicker = home_figures(local(asked=steady(8 * (4e-4 + 100e-6))), top_k=4)  # asking helped
    assert quicker.sync_s == 0
    assert quicker.compute_fixed_s + 4 * quicker.compute_s == pytest.approx(100e-6)


def test_a_miss_costs_more_than_its_read() -> None:
    home = home_figures(local(), top_k=4)
    assert (home.page_cache_s, home.ssd_s) == (pytest.approx(50e-6), pytest.approx(1.2e-4))
    two = home_figures(local(readers=2), top_k=4)  # both misses at once
    assert two.page_cache_s == pytest.approx(100e-6)
    unknown = home_figures(local(missed=None, misses=0), top_k=4)
    assert (unknown.page_cache_s, unknown.ssd_s) == (3e-5, 1e-4)


def remote(rtt_s: float, per_byte_s: float) -> RemoteFigures:
    """A worker behind a link, one row of 8192 bytes each way, 20 µs a pair; asking costs 10 µs."""
    wire = tuple((2 * rows * 8192, steady(rtt_s + 2 * rows * 8192 * per_byte_s)) for rows in (1, 4, 16, 64))
    layer = tuple((k, steady(10e-6 + rtt_s + (k + 1) * 8192 * per_byte_s + k * 20e-6)) for k in (1, 2, 4))
    return RemoteFigures("lane", layer, wire)


@pytest.mark.parametrize("bandwidth", [None, 10e6, 1e9])
def test_bytes_are_told_apart_from_round_trips_and_computing(bandwidth: float | None) -> None:
    per_byte_s = 1 / bandwidth if bandwidth else 0.0
    found = worker_figures("a:1", remote(500e-6, per_byte_s), sync_s=10e-6, row_bytes=8192, power_w=None)
    assert found.bandwidth_bytes_s == (pytest.approx(bandwidth) if bandwidth else None)
    assert found.round_trip_s == pytest.approx(500e-6)
    assert found.latency_s == pytest.approx(500e-6)
    assert found.compute_s == pytest.approx(20e-6)
    assert len(found.wire) == 4
    assert found.layer_s(4, 8192) == pytest.approx(500e-6 + 5 * 8192 * per_byte_s + 80e-6)


def test_sharing_a_layer_costs_what_it_took() -> None:
    near = WorkerFigures("a:1", 20e-6, 400e-6, None, 0.1)
    far = WorkerFigures("b:1", 20e-6, 900e-6, None, 0.1)
    figures = {"near": near, "far": far}
    home = HomeFigures(4e-4, 10e-6, 30e-6, 20e-6, 1.5e-4, 3e-5, 4, 0.1)
    both = with_sharing(figures, {"near": 2, "far": 2}, home, 1, 8192, together_s=1110e-6)
    assert both["far"].round_trip_s == pytest.approx(900e-6 + 160e-6)
    assert both["near"].round_trip_s == pytest.approx(400e-6 + 160e-6)
    assert with_sharing(figures, {"near": 2, "far": 2}, home, 1, 8192, together_s=800e-6) == figures
    busy = replace(home, compute_s=1e-3)  # node 0 is the slowest
    assert with_sharing(figures, {"near": 2}, busy, 1, 8192, together_s=1020e-6) == figures


def test_noise_is_measured_longer_and_flagged() -> None:
    turns = iter([1e-6, 9e-6] * 1000)
    noisy = summarise(lambda: next(turns), samples=5, budget_s=0.01)
    assert noisy.noisy
    assert noisy.samples > 5
    calm = summarise(lambda: 5e-6, samples=5, budget_s=0.01)
    assert (calm.noisy, calm.samples, calm.median_s) == (False, 5, 5e-6)


def test_what_others_take_is_seen_and_outwaited() -> None:
    burning = threading.Event()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    looks: list[str] = []

    def look() -> Measured:
        looks.append("quiet" if burning.is_set() else "busy")
        if len(looks) == 2:
            child.kill()
            child.wait(10)
            burning.set()
        others = OtherWork()
        while time.perf_counter() - begun[0] < 0.2 * len(looks):
            time.sleep(0.01)
        return Measured(5.0 if others.cores() < QUIET_CORES else 1.0, 0.0, 1)

    begun = [time.perf_counter()]
    try:
        found = quiet_rounds({"it": look})["it"]
    finally:
        child.kill()
        child.wait(10)
    assert 2 < len(looks) <= MOST_ROUNDS
    # The quickest of all was measured while others worked: it does not count once there are quiet ones.
    assert found.median_s == 5.0 or found.others_cores > QUIET_CORES


def test_figures_are_kept_by_what_they_are_good_for(tmp_path: Path) -> None:
    shape = open_checkpoint(DEMO_MODEL).shape
    key = figures_key(shape, "float32", {"mini": ["10.0.0.2:7077"]})
    assert key != figures_key(shape, "float32", {"mini": ["10.0.0.2:7077", "10.0.0.3:7077"]})
    assert key != figures_key(shape, "bfloat16", {"mini": ["10.0.0.2:7077"]})
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
    readers = ReaderPool(2)
    phases: list[str] = []
    try:
        model, scratch = load_host_model(checkpoint, "float32"), scratch_layer(checkpoint, store, readers, "float32")
        steps = DecodeSteps(model, {spec.index: scratch for spec in checkpoint.shape.layers})
        local = measure_local(checkpoint, store, readers, steps, scratch, "float32", phases.append)
    finally:
        readers.close()
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
