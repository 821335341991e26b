"""A file that is whole or not there: written under another name, synced, then renamed. Knows no content."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path, mode: int = 0o644, suffix: str = ".tmp") -> Iterator[BinaryIO]:
    """A file to write into; it takes the name `path` when the block ends without an exception.

    Args:
        mode: permissions, from the moment the file exists no wider than these.
        suffix: of the name it has until then, in the same folder.

    Raises:
        OSError: as the system says it; nothing is left and what had the name before is there still.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:64]}-", suffix=suffix, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
