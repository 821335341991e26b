"""Run: `.venv/bin/pytest tests/common/test_platform.py`. What only a Mac has is injected."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titan.common import platform

GIB = 1 << 30


def test_this_machine_has_memory_and_so_has_this_process() -> None:
    total, available = platform.total_memory_bytes(), platform.available_memory_bytes()
    assert 0 < available <= total
    assert 0 <= platform.memory_budget_bytes() < total
    assert 1 << 20 < platform.process_memory_bytes() < total
    assert platform.process_peak_bytes() >= platform.process_memory_bytes() // 2


def test_the_peak_follows_memory_that_was_used() -> None:
    before = platform.process_peak_bytes()
    block = b"x" * (platform.process_peak_bytes() + (64 << 20))  # more than was ever resident
    assert len(block) > before
    assert platform.process_peak_bytes() > before + (32 << 20)


@pytest.mark.parametrize(
    ("system", "total", "available", "working_set", "budget"),
    [
        ("darwin", 64 * GIB, 1 * GIB, 48 * GIB, 48 * GIB - 64 * GIB // 10),  # other programs' memory is not counted
        ("darwin", 8 * GIB, 8 * GIB, None, 8 * GIB * 2 // 3 - GIB),  # no Metal
        ("linux", 64 * GIB, 32 * GIB, None, 32 * GIB - 64 * GIB // 10),
        ("linux", 2 * GIB, 2 * GIB, None, 2 * GIB - GIB // 2),  # the reserve is never over a quarter
        ("linux", 2 * GIB, GIB // 4, None, 0),
    ],
)
def test_the_budget_leaves_a_reserve(
    system: str, total: int, available: int, working_set: int | None, budget: int
) -> None:
    found = platform.memory_budget_bytes(
        platform=system, total=lambda: total, available=lambda: available, metal_working_set=lambda: working_set
    )
    assert found == budget


def _cgroup(folder: Path, limit: str, current: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 9\n")


def test_the_tightest_container_limit_counts(tmp_path: Path) -> None:
    root, self_file = tmp_path / "cgroup", tmp_path / "self"
    self_file.write_text("1:name=systemd:/x\n0::/pod/box\n")
    _cgroup(root / "pod" / "box", "max", 1000, 0)
    assert platform.cgroup_memory(root, self_file) == (None, 0)
    _cgroup(root / "pod", "8000", 3000, 1000)
    assert platform.cgroup_memory(root, self_file) == (8000, 2000)
    _cgroup(root / "pod" / "box", "7000", 500, 0)  # 6500 left: the pod, with 6000, is tighter
    assert platform.cgroup_memory(root, self_file) == (8000, 2000)
    _cgroup(root / "pod" / "box", "4000", 500, 0)
    assert platform.cgroup_memory(root, self_file) == (4000, 500)


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert platform.cgroup_memory(tmp_path, tmp_path / "absent") == (None, 0)
    (tmp_path / "self").write_text("0::/../../outside\n")
    assert platform.cgroup_memory(tmp_path / "cgroup", tmp_path / "self") == (None, 0)


def test_macos_shows_the_footprint() -> None:
    asked: list[tuple[int, int]] = []

    def rusage(pid: int, flavor: int, buffer: ctypes.Array) -> int:
        asked.append((pid, flavor))
        ctypes.memmove(ctypes.addressof(buffer) + 16 + 7 * 8, (123 << 20).to_bytes(8, sys.byteorder), 8)
        return 0

    assert platform.process_memory_bytes(platform="darwin", rusage=rusage) == 123 << 20
    assert asked == [(os.getpid(), 0)]
    assert platform.process_memory_bytes(platform="darwin", rusage=lambda *_: -1) > 1 << 20  # resident set instead


def test_macos_counts_the_peak_in_bytes() -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert platform.process_peak_bytes(platform="darwin") >= peak
    assert platform.process_peak_bytes(platform="linux", status_file=Path("/nonexistent")) >= peak * 1024


@pytest.mark.parametrize("bypass", [False, True])
def test_a_file_is_opened_for_positional_reads(tmp_path: Path, bypass: bool) -> None:
    path = tmp_path / "experts"
    path.write_bytes(bytes(range(256)) * 64)
    fd = platform.open_for_reading(path, bypass_cache=bypass)
    try:
        assert os.pread(fd, 4, 256 + 7) == bytes([7, 8, 9, 10])
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        platform.drop_cached(fd, 0, 4096)
        assert os.pread(fd, 1, 0) == b"\0"
    finally:
        os.close(fd)


def test_macos_turns_its_cache_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "experts"
    path.write_bytes(b"x")
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(platform.fcntl, "fcntl", lambda _fd, command, value: calls.append((command, value)))
    os.close(platform.open_for_reading(path, bypass_cache=True, platform="darwin"))
    os.close(platform.open_for_reading(path, bypass_cache=False, platform="darwin"))
    assert calls == [(48, 1)]


def test_a_refused_cache_mode_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "experts"
    path.write_bytes(b"x")
    opened: list[int] = []

    def refuse(fd: int, *_: int) -> None:
        opened.append(fd)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(platform.fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        platform.open_for_reading(path, bypass_cache=True, platform="darwin")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_a_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        platform.open_for_reading(tmp_path / "absent", bypass_cache=False)


def test_the_machine_is_kept_awake_while_the_block_runs() -> None:
    children: list[subprocess.Popen[bytes]] = []

    def launch(command: list[str]) -> subprocess.Popen[bytes]:
        assert command == ["caffeinate", "-i", "-m", "-s", "-w", str(os.getpid())]
        children.append(subprocess.Popen(["sleep", "60"]))
        return children[0]

    with platform.keep_awake(platform="darwin", launch=launch) as awake:
        assert awake
        assert children[0].poll() is None
    assert children[0].poll() == -signal.SIGTERM


def test_without_caffeinate_or_elsewhere_nothing_happens() -> None:
    def launch(_: list[str]) -> subprocess.Popen[bytes]:
        raise FileNotFoundError("caffeinate")

    with platform.keep_awake(platform="darwin", launch=launch) as awake:
        assert not awake
    with platform.keep_awake(platform="linux") as awake:
        assert not awake


def test_the_limit_of_open_files_is_raised_and_never_lowered() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert platform.set_nofile_limit(300) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
        assert platform.set_nofile_limit(10) == 300
        assert platform.set_nofile_limit(1 << 40) <= (hard if hard != resource.RLIM_INFINITY else 1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
