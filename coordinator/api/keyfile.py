"""The file of API keys: one key in the clear, or named keys as digests, one a line. Read and appended to here alone.

NAME user|operator sha256:HEX [requests_per_minute=N]
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from titan.common.config.api_key import read_api_key
from titan.common.errors import ConfigError
from titan.common.whole_file import whole_file
from titan.coordinator.api.auth import ApiKeys, Key, key_digest

__all__ = ["add_key", "read_keys"]

_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9_.-]{1,64}) (?P<role>user|operator) sha256:(?P<hex>[0-9a-f]{64})"
    r"(?: requests_per_minute=(?P<limit>[1-9][0-9]{0,5}))?"
)
_MAX_FILE_BYTES = 1 << 20


def read_keys(path: Path) -> ApiKeys:
    """The keys in a file.

    Raises:
        ConfigError: it cannot be read, is open to others, or a line is not a key's.
    """
    lines = _lines(path)
    if not any(" sha256:" in line for line in lines):
        return ApiKeys.of([read_api_key(path)])
    return ApiKeys(_keys(path, lines))


def add_key(path: Path, name: str, *, operator: bool, requests_per_minute: int | None) -> str:
    """Make a key, append its digest, and return the key, which is kept nowhere."""
    lines = _lines(path) if path.exists() else []
    if any(key.name == name for key in _keys(path, lines)):
        raise ConfigError(f"{path} has a key {name!r} already", "choose another name, or delete its line")
    key = f"titan-{secrets.token_urlsafe(32)}"
    limit = "" if requests_per_minute is None else f" requests_per_minute={requests_per_minute}"
    line = f"{name} {'operator' if operator else 'user'} sha256:{key_digest(key).hex()}{limit}"
    if not _LINE.fullmatch(line):
        raise ConfigError(f"{name!r} is no name for a key", "use letters, digits, dots, dashes and underscores")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, mode=0o600) as file:
            file.write(("\n".join([*lines, line]) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error})", "choose another --file") from error
    return key


def _keys(path: Path, lines: list[str]) -> list[Key]:
    keys: list[Key] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(f"line {number} of {path} is not a key's", "make keys with `titan keys add NAME`")
        limit = None if match["limit"] is None else int(match["limit"])
        keys.append(Key(match["name"], bytes.fromhex(match["hex"]), match["role"] == "operator", limit))
    return keys


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_FILE_BYTES} bytes", "give a file of keys")
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"others can read {path}", f"run `chmod 600 {path}`")
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the API keys in {path} cannot be read ({error})", "make it with `titan keys add`"
        ) from error
