"""Open files of one copy of a checkpoint: checked to be the files that were opened, with or without the page cache.

A mode that a file system refuses falls back to the next gentler one; that is counted and logged once. Knows paths and
descriptors, no experts.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from titan.common.errors import CheckpointChanged, StoreError
from titan.common.log import get_logger
from titan.common.platform import open_for_reading
from titan.common.registry.shards import Shard

__all__ = ["CacheMode", "OpenFile", "ShardFiles"]

log = get_logger("store")


class CacheMode(StrEnum):
    """How reads treat the operating system's page cache.

    PAGE_CACHE: use it. DIRECT: never touch it (O_DIRECT; F_NOCACHE on macOS). DROP: read through it and give the pages
    back (POSIX_FADV_DONTNEED; F_NOCACHE on macOS).
    """

    PAGE_CACHE = "page-cache"
    DIRECT = "direct"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A descriptor and the mode that it was opened in."""

    path: Path
    fd: int
    mode: CacheMode


class ShardFiles:
    """Descriptors by path, opened on first use. Thread-safe."""

    def __init__(self, shards: Sequence[Shard], mode: CacheMode, *, platform: str = sys.platform) -> None:
        self.fallbacks = 0
        self._identities = {shard.path: shard.identity for shard in shards}
        self._mode = mode
        self._platform = platform
        self._open: dict[Path, OpenFile] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> OpenFile:
        """Raises StoreError when it cannot be opened, CheckpointChanged when it is another file now."""
        return self._open.get(path) or self._open_once(path)

    def opened(self, path: Path) -> OpenFile | None:
        """The file if it is open already: opening it may wait for a disk."""
        return self._open.get(path)

    def without_direct(self, file: OpenFile) -> OpenFile:
        """The file again, opened without O_DIRECT because a read with it was refused."""
        with self._lock:
            current = self._open.get(file.path)
            if current is not None and current.fd == file.fd:
                # The old descriptor stays open until `close`: another thread may be reading from it.
                self._open[file.path.with_name(f"{file.path.name}#direct")] = current
                self._fall_back(file.path, "reads with O_DIRECT are refused")
                self._open[file.path] = self._checked(file.path, CacheMode.DROP)
            return self._open[file.path]

    def close(self) -> None:
        with self._lock:
            files, self._open = self._open, {}
        for file in files.values():
            os.close(file.fd)

    def _open_once(self, path: Path) -> OpenFile:
        with self._lock:
            if path not in self._open:
                self._open[path] = self._checked(path, self._mode)
            return self._open[path]

    def _checked(self, path: Path, mode: CacheMode) -> OpenFile:
        try:
            file = self._open_in(path, mode)
        except OSError as error:
            mend = "Restore the checkpoint"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                mend = "Raise the limit of open files (ulimit -n)"
            raise StoreError(f"{path} cannot be opened ({error.strerror})", mend) from error
        status = os.fstat(file.fd)
        if (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) != self._identities[path]:
            os.close(file.fd)
            raise CheckpointChanged(f"{path} was replaced after it was opened", "Start again")
        return file

    def _open_in(self, path: Path, mode: CacheMode) -> OpenFile:
        if mode is CacheMode.DIRECT and self._platform != "darwin":
            try:
                return OpenFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), mode)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fall_back(path, "its file system has no O_DIRECT")
                mode = CacheMode.DROP
        bypass = mode is not CacheMode.PAGE_CACHE
        try:
            return OpenFile(path, open_for_reading(path, bypass_cache=bypass, platform=self._platform), mode)
        except OSError:
            if not bypass:
                raise
            fd = open_for_reading(path, bypass_cache=False, platform=self._platform)
            self._fall_back(path, "the page cache cannot be bypassed")
            return OpenFile(path, fd, CacheMode.PAGE_CACHE)

    def _fall_back(self, path: Path, why: str) -> None:
        self.fallbacks += 1
        if self.fallbacks == 1:
            log.warning("reading falls back to a gentler cache mode", file=str(path), reason=why)
