"""Sizes and durations as people write them (`8GiB`, `1.5GB`, `250ms`), and back. Knows no file and no option name.

`Size` (int, bytes) and `Duration` (float, seconds) are the same parsers as pydantic types. GiB counts in 1024s and GB
in 1000s; a bare letter such as `8G` could mean either and is refused. Both are positive: nothing that Titan reads as a
size or a time makes sense as zero unless its owner asks for `allow_zero`.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from titan.common.errors import ConfigError

MAX_SIZE_BYTES = 2**60
MAX_DURATION_S = 366 * 86_400.0
MAX_TEXT_CHARS = 40

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[ \t]*([A-Za-zµμ]*)", re.ASCII)
_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_DURATION_UNITS = {
    unit: Decimal(seconds)
    for unit, seconds in {
        "ns": "1e-9",
        "us": "1e-6",
        "µs": "1e-6",  # micro sign
        "μs": "1e-6",  # Greek mu, which some keyboards give
        "ms": "1e-3",
        "s": "1",
        "sec": "1",
        "m": "60",
        "min": "60",
        "h": "3600",
    }.items()
}
_SIZE_MEND = "Write a size such as 8GiB (1024s), 1.5GB (1000s) or a plain number of bytes"
_DURATION_MEND = "Write a time with its unit, such as 250ms, 2s, 5m or 40us"


def parse_size(value: str | int, *, allow_zero: bool = False) -> int:
    """Bytes of `8GiB`, `512 MiB`, `1.5GB` or a plain integer. A fraction of a byte is dropped.

    Raises:
        ConfigError: not a size, an unknown or ambiguous unit, zero, negative, or beyond 2**60 bytes.
    """
    number, unit = _split(value, "size", _SIZE_MEND)
    factor = _SIZE_UNITS.get(unit.lower())
    if factor is None:
        letter = unit[:1].upper()
        mend = (
            f"Write {number}{letter}iB (1024s) or {number}{letter}B (1000s)" if unit.upper() in "KMGTP" else _SIZE_MEND
        )
        raise ConfigError(f"{_shown(value)} is not a size: unit {unit!r} is not known", mend)
    if not unit and number != number.to_integral_value():
        raise ConfigError(f"{_shown(value)} is not a size: a plain number counts whole bytes", _SIZE_MEND)
    size_bytes = number * factor
    if size_bytes > MAX_SIZE_BYTES:
        raise ConfigError(f"{_shown(value)} is too large for a size (the limit is 1024PiB)", _SIZE_MEND)
    whole_bytes = int(size_bytes)
    if whole_bytes == 0 and not (allow_zero and number == 0):
        raise ConfigError(f"{_shown(value)} is not a size that can be used: it is less than one byte", _SIZE_MEND)
    return whole_bytes


def parse_duration(value: str | int | float, *, allow_zero: bool = False) -> float:
    """Seconds of `250ms`, `2s`, `5m`, `40us`. Numbers that are not text already are seconds.

    Raises:
        ConfigError: not a time, text without a unit, zero, negative, NaN, infinite, or beyond a year.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value) if abs(value) <= MAX_DURATION_S else math.inf  # NaN compares false
    else:
        number, unit = _split(value, "time", _DURATION_MEND)
        factor = _DURATION_UNITS.get(unit.lower())
        if factor is None and (unit or number or not allow_zero):
            reason = f"unit {unit!r} is not known" if unit else "it has no unit"
            raise ConfigError(f"{_shown(value)} is not a time: {reason}", _DURATION_MEND)
        seconds = float(number * (factor or 0))
    if not 0 <= seconds <= MAX_DURATION_S:
        raise ConfigError(f"{_shown(value)} is not a time between 0 and 366 days", _DURATION_MEND)
    if seconds == 0 and not allow_zero:
        raise ConfigError(f"{_shown(value)} is no time at all: this must be longer than zero", _DURATION_MEND)
    return seconds


def _split(value: object, what: str, mend: str) -> tuple[Decimal, str]:
    """Number and unit of a text; the text is bounded first, so that the number is too."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"{_shown(value)} is not a {what}", mend)
    text = str(value).strip(" \t") if not isinstance(value, int) or abs(value) < 10**30 else "x"
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_TEXT_CHARS else None
    if match is None:
        raise ConfigError(f"{_shown(value)} is not a {what}", mend)
    return Decimal(match[1]), match[2]


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return "this number"
    text = repr(value)
    return text if len(text) <= MAX_TEXT_CHARS + 2 else f"{text[:MAX_TEXT_CHARS]}…"


def _pydantic_size(value: object) -> int:
    try:
        return parse_size(value)  # type: ignore[arg-type]
    except ConfigError as error:
        raise PydanticCustomError("size", "{reason}", {"reason": f"{error.cause}. {error.mend}"}) from error


def _pydantic_duration(value: object) -> float:
    try:
        return parse_duration(value)  # type: ignore[arg-type]
    except ConfigError as error:
        raise PydanticCustomError("duration", "{reason}", {"reason": f"{error.cause}. {error.mend}"}) from error


Size = Annotated[int, BeforeValidator(_pydantic_size)]
"""Bytes, > 0; reads `8GiB`, `1.5GB` or an integer."""

Duration = Annotated[float, BeforeValidator(_pydantic_duration)]
"""Seconds, > 0; reads `250ms`, `2s`, `5m`."""


def format_bytes(size_bytes: int) -> str:
    """`8589934592` -> `8 GiB`, `1536` -> `1.5 KiB`: three significant digits, units of 1024."""
    value, unit = float(abs(size_bytes)), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if round(value) < 1024:
            break
        value, unit = value / 1024, larger
    sign = "-" if size_bytes < 0 else ""
    return f"{sign}{_three_digits(value)} {unit}"


def format_seconds(seconds: float) -> str:
    """`0.00025` -> `250 µs`, `90` -> `1.5 min`: three significant digits."""
    if not math.isfinite(seconds):
        return str(seconds)
    magnitude = abs(seconds)
    sign = "-" if seconds < 0 else ""
    if magnitude == 0:
        return "0 s"
    for unit, scale, limit in (("ns", 1e-9, 1e-6), ("µs", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 60.0)):
        if float(f"{magnitude:.3g}") < limit:
            return f"{sign}{_three_digits(magnitude / scale)} {unit}"
    unit, scale = ("min", 60.0) if magnitude < 3600 else ("h", 3600.0) if magnitude < 86_400 * 2 else ("days", 86_400.0)
    return f"{sign}{_three_digits(magnitude / scale)} {unit}"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
