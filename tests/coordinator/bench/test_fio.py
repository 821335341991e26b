"""fio as a reference: what it reads, and that nothing depends on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from titan.coordinator.bench import fio


def test_without_fio_there_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fio.fio_bytes_per_s(tmp_path / "absent", 4096, 2) is None


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_reads_the_file_and_says_how_fast(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"titan" * 200_000)
    rate = fio.fio_bytes_per_s(file, 65536, 2, direct=False)
    assert rate is not None
    assert rate > 0
    assert fio.fio_bytes_per_s(file, 1 << 30, 2) is None, "not one block of it"
    assert file.stat().st_size == 1_000_000
