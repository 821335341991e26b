"""A calibration that is interrupted leaves the figures that were kept, and nothing half-written.

Run: .venv/bin/pytest tests/cluster/test_interrupted.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fixtures.processes import write_hosts

from titan.coordinator.calibration.figures import figures_key, keep_figures
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.deploy import DEMO_MODEL
from titan.placement.figures import Figures, HomeFigures

HOME = HomeFigures(4e-4, 1e-5, 30e-6, 20e-6, ssd_s=20e-3, page_cache_s=20e-3, readers=1, spread=0.1)
START_S, END_S = 60.0, 30.0


def test_an_interrupted_calibration_leaves_the_figures_there_were(tmp_path: Path) -> None:
    with LoopbackCluster(DEMO_MODEL, ("worker-1",)) as loopback:
        hosts = write_hosts(tmp_path / "hosts.yaml", loopback.hosts)
        folder = tmp_path / ".titan" / "figures"
        key = figures_key(loopback.checkpoint.shape, "float32", {"worker-1": [loopback.workers[0].address]})
        keep_figures(folder, Figures(key, HOME, {}))
        before = {file: file.read_bytes() for file in folder.iterdir()}
        said = tmp_path / "said"
        with said.open("wb") as output:
            command = [sys.executable, "-m", "titan.cli", "calibrate", "--hosts", str(hosts)]
            environment = os.environ | {"HOME": str(tmp_path), "TERM": "xterm", "TTY_COMPATIBLE": "1"}
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            try:
                deadline = time.monotonic() + START_S
                while b"calibrating" not in said.read_bytes():
                    assert process.poll() is None, said.read_text()
                    assert time.monotonic() < deadline, said.read_text()
                    time.sleep(0.02)
                process.send_signal(signal.SIGINT)
                assert process.wait(END_S) == 130, said.read_text()
            finally:
                process.kill()
                process.wait(10)
        assert {file: file.read_bytes() for file in folder.iterdir()} == before
        assert "Traceback" not in said.read_text()
