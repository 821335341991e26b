"""Log lines on standard error, as text for people or JSON for machines. Knows no package that logs.

    log = get_logger("worker")
    log.info("session opened", coordinator="desk", epoch=3)
    2026-11-30T12:00:00.123Z INFO  worker  session opened coordinator=desk epoch=3

One record is one line: control characters, line separators and direction marks are escaped in messages, names and
fields, so that nothing a peer or a client sends can forge a line. A traceback follows on lines that begin with "  | ".
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from typing import Any, Literal, TextIO, get_args

from titan.common.errors import ConfigError

LogFormat = Literal["text", "json"]
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
MAX_TEXT_CHARS = 16_384
_ROOT = "titan"
_FIELDS = "titan_fields"


class Log:
    """A named logger that takes fields as keywords. `exc_info=True` adds the traceback of the current exception."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, message: str, /, **fields: Any) -> None:
        self._emit(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: Any) -> None:
        self._emit(logging.INFO, message, fields)

    def warning(self, message: str, /, *, exc_info: bool | BaseException = False, **fields: Any) -> None:
        self._emit(logging.WARNING, message, fields, exc_info)

    def error(self, message: str, /, *, exc_info: bool | BaseException = False, **fields: Any) -> None:
        self._emit(logging.ERROR, message, fields, exc_info)

    def is_enabled(self, level: int) -> bool:
        """Whether a record of `logging.DEBUG`, ... would be written: ask before computing costly fields."""
        return self._logger.isEnabledFor(level)

    def _emit(self, level: int, message: str, fields: dict[str, Any], exc_info: bool | BaseException = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", message, exc_info=exc_info, extra={_FIELDS: fields}, stacklevel=3)


def get_logger(name: str) -> Log:
    """The logger `name` ("worker", "coordinator.sessions"); shown under that name."""
    return Log(logging.getLogger(f"{_ROOT}.{name}"))


def setup_logging(log_format: str = "text", level: str = "INFO", *, stream: TextIO | None = None) -> None:
    """Send every log record of the process to `stream` (standard error) in one format; safe to call again.

    Args:
        log_format: "text" or "json".
        level: of Titan's own loggers; libraries are heard from WARNING on.

    Raises:
        ConfigError: unknown format or level.
    """
    if log_format not in get_args(LogFormat):
        raise ConfigError(f"log format {log_format!r} is not known", "Use text or json")
    if level.upper() not in LEVELS:
        raise ConfigError(f"log level {level!r} is not known", f"Use one of {', '.join(LEVELS)}")
    handler = _Handler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level.upper())


class _Handler(logging.StreamHandler):  # a type of its own, so that a second set-up finds the first
    pass


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_timestamp(record)} {record.levelname:<5} {escape(_name(record))}  {escape(record.getMessage())}"]
        parts += [f"{escape(key)}={_field_text(value)}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "".join(f"\n  | {escape(row)}" for row in self.formatException(record.exc_info).splitlines())
        return line


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "ts": _timestamp(record),
            "level": record.levelname,
            "logger": _name(record),
            "message": record.getMessage()[:MAX_TEXT_CHARS],
        }
        for key, value in _fields(record).items():
            entry[f"{key}_" if key in entry else key] = _plain(value)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)[:MAX_TEXT_CHARS]
        return json.dumps(entry, separators=(",", ":"))


def escape(text: str) -> str:
    """`text` with every character that is not printable replaced by its escape (`\\n`, `\\x1b`, `\\u2028`), and cut.

    A backslash stays as it is: the aim is one line that a terminal shows harmlessly, not a reversible form.
    """
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def _timestamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _name(record: logging.LogRecord) -> str:
    return record.name.removeprefix(f"{_ROOT}.")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return record.__dict__.get(_FIELDS, {})


def _field_text(value: object) -> str:
    text = escape(f"{value:.6g}" if isinstance(value, float) else str(value))
    if text and not any(c in ' "=' for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _plain(value: object, depth: int = 0) -> object:
    """`value` as something JSON has: non-finite floats and unknown types become text, nesting is cut at four levels."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict) and depth < 4:
        return {str(k): _plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and depth < 4:
        return [_plain(v, depth + 1) for v in value]
    return str(value)[:MAX_TEXT_CHARS]
