"""Run: `.venv/bin/pytest tests/common/test_log.py`."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.common.errors import ConfigError
from titan.common.log import JsonFormatter, TextFormatter, get_logger, setup_logging

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root, titan = logging.getLogger(), logging.getLogger("titan")
    before = (root.handlers[:], root.level, titan.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    titan.setLevel(before[2])


def test_a_text_line_has_time_level_name_message_and_fields() -> None:
    out = io.StringIO()
    setup_logging("text", stream=out)
    get_logger("worker").info("session opened", worker="mini", epoch=3, note="two words", empty="")
    assert re.fullmatch(
        STAMP + r' INFO  worker  session opened worker=mini epoch=3 note="two words" empty=""\n', out.getvalue()
    )


def test_a_json_line_is_one_object() -> None:
    out = io.StringIO()
    setup_logging("json", stream=out)
    get_logger("worker").warning("late", share=float("nan"), nested={"a": [1, (2,)]}, level="mine", path=b"\xff")
    entry = json.loads(out.getvalue(), parse_constant=pytest.fail)
    assert re.fullmatch(STAMP, entry.pop("ts"))
    assert entry == {
        "level": "WARNING",
        "logger": "worker",
        "message": "late",
        "share": "nan",
        "nested": {"a": [1, [2]]},
        "level_": "mine",
        "path": "b'\\xff'",
    }


def test_a_message_with_percent_signs_is_not_a_format() -> None:
    out = io.StringIO()
    setup_logging("text", stream=out)
    get_logger("worker").info("100 %s %d")
    assert "100 %s %d" in out.getvalue()


@pytest.mark.parametrize("log_format", ["text", "json"])
@given(text=st.text(alphabet=st.sampled_from(LINE_ENDS + "\x00\x1b[31m\u202e\ud800 =\"'\\ab"), max_size=40))
def test_nothing_forges_a_line(log_format: str, text: str) -> None:
    out = io.StringIO()
    setup_logging(log_format, stream=out)
    get_logger("worker").error(text, peer=text)
    logging.getLogger(f"other{text}").error(text)  # a library's record goes the same way
    written = out.getvalue()
    assert written.count("\n") == 2
    assert len(written.splitlines()) == 2
    assert all(line.isprintable() for line in written.splitlines())
    written.encode()


def test_a_traceback_is_escaped_and_marked() -> None:
    out = io.StringIO()
    setup_logging("text", stream=out)
    try:
        raise ValueError("bad\n2026-11-30T12:00:00.123Z ERROR worker  forged\x1b")
    except ValueError:
        get_logger("worker").error("failed", exc_info=True)
    first, *rest = out.getvalue().splitlines()
    assert first.endswith("failed")
    assert rest
    assert all(line.startswith("  | ") and line.isprintable() for line in rest)
    assert any("ValueError: bad" in line for line in rest)


def test_a_traceback_is_a_field_in_json() -> None:
    out = io.StringIO()
    setup_logging("json", stream=out)
    get_logger("worker").error("failed", exc_info=ValueError("bad"))
    assert json.loads(out.getvalue())["exception"].endswith("ValueError: bad")


def test_levels_and_a_second_setup() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("text", stream=first)
    setup_logging("text", "debug", stream=second)
    log = get_logger("worker")
    log.debug("seen once")
    logging.getLogger("some.library").info("too low for a library")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1
    setup_logging("text", "ERROR", stream=second)
    log.warning("too low")
    assert not log.is_enabled(logging.WARNING)
    assert second.getvalue().count("\n") == 1


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    get_logger("worker").info("hello")
    captured = capsys.readouterr()
    assert "hello" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("log_format", "level"), [("xml", "INFO"), ("text", "LOUD")])
def test_an_unknown_format_or_level_is_refused(log_format: str, level: str) -> None:
    with pytest.raises(ConfigError, match="Use"):
        setup_logging(log_format, level)


def test_a_huge_message_is_cut() -> None:
    record = logging.LogRecord("titan.worker", logging.INFO, "", 0, "x" * 1_000_000, None, None)
    for formatter in (TextFormatter(), JsonFormatter()):
        assert len(formatter.format(record)) < 20_000


def test_the_record_names_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    setup_logging("text", stream=io.StringIO())
    get_logger("worker").info("where")
    assert caplog.records[-1].filename == "test_log.py"
