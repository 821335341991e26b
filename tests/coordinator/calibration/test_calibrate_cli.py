"""How figures are shown to people. Run: .venv/bin/pytest tests/coordinator/calibration"""

from __future__ import annotations

from dataclasses import replace

import pytest

from titan.coordinator.calibrate_cli import show_figures
from titan.placement.figures import Figures, HomeFigures, WorkerFigures

HOME = HomeFigures(4e-4, 1e-5, 30e-6, 20e-6, ssd_s=20e-3, page_cache_s=20e-3, readers=1, spread=0.1)
NEAR = WorkerFigures("a:1", 30e-6, 100e-6, None, 0.1)


def test_the_table_names_what_was_measured_and_what_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    reads = replace(NEAR, ssd_s=7.5e-3, readers=2, ssd_spread=0.5)
    workers = {"worker-1": NEAR, "worker-3": reads}
    show_figures(Figures("k", HOME, workers), 3 << 30, {"worker-1": 2 << 30}, {"worker-2": "refused"})
    shown = capsys.readouterr().out
    for text in (
        "this machine",
        "3 GiB",
        "worker-1",
        "2 GiB",
        "worker-2",
        "refused",
        "worker-3 reads an expert",
        "7.5 ms",
        "the disk of worker-3",
    ):
        assert text in shown
