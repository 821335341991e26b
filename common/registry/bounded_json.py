"""JSON from outside, with its size bounded before it is parsed. Knows nothing of what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

from titan.common.errors import CheckpointMissing, CheckpointTruncated

__all__ = ["parse_object", "read_object"]

MAX_FILE_BYTES = 64 << 20
MAX_FILE_VALUES = 1 << 21
MAX_DEPTH = 64


def parse_object(text: bytes, max_values: int) -> dict[str, object]:
    """Parse a JSON object.

    Raises:
        ValueError: not JSON in UTF-8, not an object, a key twice, more than `max_values` values or `MAX_DEPTH` levels.
            The values are counted beforehand, which bounds what the parser allocates.
    """
    if text.count(b",") + text.count(b"{") + text.count(b"[") > max_values:
        raise ValueError(f"more than {max_values} values")
    try:
        value = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not an object")
    _check_depth(value)
    return value


def read_object(path: Path, mend: str) -> dict[str, object]:
    """Read a JSON object from a file of at most `MAX_FILE_BYTES`.

    Raises:
        CheckpointMissing: absent or not readable.
        CheckpointTruncated: too large, not JSON or not an object.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CheckpointMissing(f"{path} cannot be read ({error.strerror})", mend) from error
    if len(text) > MAX_FILE_BYTES:
        raise CheckpointTruncated(f"{path} has more than {MAX_FILE_BYTES} bytes", mend)
    try:
        return parse_object(text, MAX_FILE_VALUES)
    except ValueError as error:
        raise CheckpointTruncated(f"{path} is not a valid JSON object ({str(error)[:200]})", mend) from error


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _check_depth(value: dict[str, object]) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)  # type: ignore[union-attr]
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
