"""Run: `.venv/bin/pytest tests/common/test_units.py`."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from titan.common.errors import ConfigError
from titan.common.units import (
    MAX_DURATION_S,
    MAX_SIZE_BYTES,
    Duration,
    Size,
    format_bytes,
    format_seconds,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5 GiB", 3 << 29),
        ("1kB", 1000),
        ("1KiB", 1024),
        (" 2TiB ", 2 << 40),
        ("7", 7),
        ("7B", 7),
        (4096, 4096),
        (".5KiB", 512),
        ("0.1GB", 100_000_000),  # exact: a float would give 100000000.00000001
    ],
)
def test_sizes_are_read(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "0",
        "0GiB",
        "0.4B",
        "1.5",
        "8XiB",
        "nan",
        "inf",
        "1e9",
        "1,5GB",
        "8 G iB",
        "٨GiB",
        True,
        1.5,
        None,
        "2EiB",
        "9" * 41,
        "99999PiB",
        [],
        "8GiB\n",
    ],
)
def test_nonsense_is_not_a_size(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)  # type: ignore[arg-type]


def test_an_ambiguous_size_says_both_readings() -> None:
    with pytest.raises(ConfigError, match=r"8GiB \(1024s\) or 8GB \(1000s\)"):
        parse_size("8G")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("2s", 2),
        ("5m", 300),
        ("5min", 300),
        ("40us", 4e-5),
        ("40µs", 4e-5),
        ("40μs", 4e-5),
        ("1.5h", 5400),
        ("7 ns", 7e-9),
        (3, 3),
        (0.5, 0.5),
    ],
)
def test_durations_are_read(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "s",
        "-2s",
        "0s",
        "0",
        "nan",
        "nans",
        "infs",
        "1e3s",
        "2 days",
        "99999999h",
        True,
        None,
        [],
        math.nan,
        math.inf,
        -math.inf,
        -1,
        0,
        0.0,
    ],
)
def test_nonsense_is_not_a_duration(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_duration(text)  # type: ignore[arg-type]


def test_a_number_too_long_to_print_is_refused_too() -> None:
    for number in (10**5000, -(10**5000)):
        with pytest.raises(ConfigError):
            parse_size(number)
        with pytest.raises(ConfigError):
            parse_duration(number)


def test_zero_is_read_where_it_is_allowed() -> None:
    assert parse_size("0", allow_zero=True) == 0
    assert parse_duration("0s", allow_zero=True) == 0
    assert parse_duration(0, allow_zero=True) == 0


class _Options(BaseModel):
    memory: Size
    wait: Duration


def test_pydantic_fields_read_units_and_give_the_sentence() -> None:
    options = _Options.model_validate({"memory": "8GiB", "wait": "250ms"})
    assert (options.memory, options.wait) == (8 << 30, 0.25)
    with pytest.raises(ValidationError) as caught:
        _Options.model_validate({"memory": "8G", "wait": -1})
    reasons = [error["msg"] for error in caught.value.errors()]
    assert "Write 8GiB" in reasons[0]
    assert "not a time" in reasons[1]


@given(st.integers(1, MAX_SIZE_BYTES))
def test_a_plain_integer_is_itself(size_bytes: int) -> None:
    assert parse_size(size_bytes) == parse_size(str(size_bytes)) == size_bytes


@given(st.one_of(st.text(max_size=60), st.integers(), st.floats(), st.booleans(), st.none(), st.binary(max_size=9)))
def test_anything_is_a_bounded_size_or_a_config_error(value: object) -> None:
    try:
        size_bytes = parse_size(value)  # type: ignore[arg-type]
    except ConfigError:
        pass
    else:
        assert 0 < size_bytes <= MAX_SIZE_BYTES


@given(st.one_of(st.text(max_size=60), st.integers(), st.floats(), st.booleans(), st.none(), st.binary(max_size=9)))
def test_anything_is_a_bounded_duration_or_a_config_error(value: object) -> None:
    try:
        seconds = parse_duration(value)  # type: ignore[arg-type]
    except ConfigError:
        pass
    else:
        assert 0 < seconds <= MAX_DURATION_S


@given(st.from_regex(r"\A[0-9]{1,6}(\.[0-9]{1,6})?[ ]?[a-zA-Z]{0,4}\Z"))
def test_numbers_with_any_unit_are_read_or_refused(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with contextlib.suppress(ConfigError):
            assert parse(text) > 0


@given(st.integers(1, MAX_SIZE_BYTES))
def test_a_formatted_size_reads_back_within_its_digits(size_bytes: int) -> None:
    assert parse_size(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.006)


@given(st.floats(1e-9, 86_000))
def test_a_formatted_duration_reads_back_within_its_digits(seconds: float) -> None:
    assert parse_duration(format_seconds(seconds)) == pytest.approx(seconds, rel=0.006)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (8 << 30, "8 GiB"),
        (-5, "-5 B"),
        ((1 << 20) - 1, "1 MiB"),
        (123_456_789, "118 MiB"),
    ],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-8, "25 ns"),
        (0.00025, "250 µs"),
        (0.0425, "42.5 ms"),
        (2, "2 s"),
        (90, "1.5 min"),
        (0.9999, "1 s"),
        (59.99, "1 min"),
        (7200, "2 h"),
        (864_000, "10 days"),
        (-0.5, "-500 ms"),
        (math.inf, "inf"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
