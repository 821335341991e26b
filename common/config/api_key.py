"""The file that holds the HTTP API's key. Knows neither HTTP nor hosts.yaml."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from titan.common.errors import ConfigError

MIN_CHARS = 16
MAX_CHARS = 512
_MAKE = "Make one with `umask 077; openssl rand -hex 32 > {path}`"


def read_api_key(path: str | os.PathLike[str]) -> str:
    """The key in the first line of `path`.

    Raises:
        ConfigError: no such file, one that others may read, or a first line that is not 16 to 512 printable characters
            without spaces. The message never shows the key.
    """
    path = Path(path)
    mend = _MAKE.format(path=path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not wait for its writer
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is not a plain file", mend)
            if status.st_mode & 0o077:
                raise ConfigError(f"{path} can be read by other users", f"Run `chmod 600 {path}`")
            line = file.read(MAX_CHARS + 3).split(b"\n", 1)[0].removesuffix(b"\r")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise ConfigError(f"{path} is not there or not a file", mend) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} cannot be read ({reason})", "Check its owner and mode") from error
    if not MIN_CHARS <= len(line) <= MAX_CHARS:
        raise ConfigError(f"the key in {path} has not {MIN_CHARS} to {MAX_CHARS} characters in its first line", mend)
    if not all(0x21 <= byte <= 0x7E for byte in line):
        raise ConfigError(f"the key in {path} has spaces or characters outside ASCII", mend)
    return line.decode("ascii")
