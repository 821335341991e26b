"""Lines that strangers can cause are few. Run: .venv/bin/pytest tests/common/test_log_limit.py"""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from titan.common.log import get_logger, setup_logging
from titan.common.log_limit import LimitedLog


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    setup_logging("text", "INFO", stream=stream)
    yield stream
    setup_logging()


def test_the_first_are_written_and_the_rest_counted(lines: io.StringIO) -> None:
    now = 100.0
    limited = LimitedLog(get_logger("test"), burst=2, window_s=60, clock=lambda: now)
    for number in range(200):
        limited.warning("lane refused", f"no. {number}\nforged", peer="10.0.0.1")
    limited.warning("call refused", "another kind")
    limited.tick()
    written = lines.getvalue().splitlines()
    assert [line.partition("  ")[2] for line in written] == [
        "lane refused: no. 0\\nforged peer=10.0.0.1",
        "lane refused: no. 1\\nforged peer=10.0.0.1",
        "call refused: another kind",
    ]
    now = 160.0
    limited.tick()
    assert len(lines.getvalue().splitlines()) == 4
    summary = lines.getvalue().splitlines()[-1]
    assert "lane refused: 198 more in 60 s count=198" in summary
    assert "no. 199" in summary
    limited.tick()
    limited.warning("lane refused", "again")  # a new minute
    assert lines.getvalue().splitlines()[-1].endswith("lane refused: again")
    limited.close()
    assert len(lines.getvalue().splitlines()) == 5


def test_the_end_tells_what_was_counted(lines: io.StringIO) -> None:
    limited = LimitedLog(get_logger("test"), burst=1)
    for _ in range(3):
        limited.warning("lane refused", "x")
    limited.close()
    limited.close()
    assert [line.count("2 more") for line in lines.getvalue().splitlines()] == [0, 1]
