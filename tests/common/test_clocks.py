"""The wall clock may jump: only what must name a date looks at it, and no wait and no deadline does.

Run: .venv/bin/pytest tests/common/test_clocks.py
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import titan

PACKAGES = ("common", "worker", "coordinator", "placement")
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
MAY = {
    "common/security": "certificates and lists have dates",
    "worker/enroll.py": "the date of the certificate for the moment",
    "worker/trust.py": "says what time it is here",
    "worker/metrics.py": "how long the certificate is still good",
    "coordinator/enroll.py": "whether a certificate has ended",
    "coordinator/certificates.py": "what ends soon",
    "coordinator/doctor": "compares clocks and dates",
    "coordinator/api": "`created` in answers",
    "coordinator/generation/prompt_cache/disk.py": "stamps files, whose order alone counts",
}


def wall_clock_reads(source: str) -> list[int]:
    """Lines that read the wall clock."""
    called = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    methods = [f for f in called if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name)]
    return [f.lineno for f in methods if isinstance(f.value, ast.Name) and (f.value.id, f.attr) in WALL]


def allowed(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/")


def test_nothing_waits_by_the_wall_clock() -> None:
    root = Path(titan.__file__).parent
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    assert len(files) > 100
    reads = {str(path.relative_to(root)): wall_clock_reads(path.read_text()) for path in files}
    found = {path: lines for path, lines in reads.items() if lines}
    odd = {path: lines for path, lines in found.items() if not any(allowed(path, place) for place in MAY)}
    assert odd == {}, "use time.monotonic() or time.perf_counter(), or say in MAY why a date is needed"
    assert [place for place in MAY if not any(allowed(path, place) for path in found)] == []


@pytest.mark.parametrize(("source", "lines"), [("import time\ntime.time()", [2]), ("time.monotonic()", [])])
def test_reads_are_found(source: str, lines: list[int]) -> None:
    assert wall_clock_reads(source) == lines
