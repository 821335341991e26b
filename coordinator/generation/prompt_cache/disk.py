"""Blocks on the SSD: bounded bytes, written by a thread of their own, read back after a restart. Knows no MLX.

A block is a file of its own, written beside its place and renamed, so that a crash leaves none half-written. What is
damaged is removed when it is met. Prompts can be read out of these files: they are for their owner alone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import OrderedDict
from pathlib import Path

from titan.common.log import get_logger
from titan.common.whole_file import whole_file
from titan.coordinator.generation.prompt_cache.file import FileBlock, decode_block, encode_block

__all__ = ["DiskBlocks"]

_QUEUE_BLOCKS = 64
_SUFFIX = ".kv"
_TEMPORARY = ".tmp"

log = get_logger("coordinator.prompt_cache")


class DiskBlocks:
    """A folder of blocks.

    Args:
        folder: made if absent; only this user may read it.
        max_bytes: of all files together; the ones used longest ago go first, whatever model they are of.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.dropped_writes = self.damaged = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._queue: queue.Queue[tuple[bytes, FileBlock] | None] = queue.Queue(_QUEUE_BLOCKS)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._scan()
        self._thread = threading.Thread(target=self._write_all, name="titan-prompt-cache", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return self._bytes

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    def read(self, name: bytes) -> FileBlock | None:
        """A block, or None when it is not there or not whole; then it is removed."""
        if name not in self._sizes:
            return None
        path = self._path(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            log.warning("a cached prompt cannot be read", file=path.name, error=str(error))
            data = b""
        block = decode_block(name, data)
        if block is None:
            self.damaged += 1
            log.warning("a cached prompt is damaged and is removed", file=path.name)
            self._remove(name)
        return block

    def touch(self, name: bytes) -> None:
        """It is used now: others go before it. Remembered over a restart."""
        with self._lock:
            if name not in self._sizes:
                return
            self._sizes.move_to_end(name)
        with contextlib.suppress(OSError):
            _mark_used(self._path(name))

    def write(self, name: bytes, block: FileBlock) -> None:
        """Write a block soon; a disk that cannot keep up loses it."""
        try:
            self._queue.put_nowait((name, block))
        except queue.Full:
            self.dropped_writes += 1

    def flush(self) -> None:
        """Wait until everything given so far has been written."""
        self._queue.join()

    def close(self, deadline_s: float = 10.0) -> None:
        """Write what was given, end the thread."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=deadline_s)
        self._thread.join(deadline_s)

    # ----------------------------------------------------------------------------------------------------------------

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{_SUFFIX}"

    def _scan(self) -> None:
        found: list[tuple[float, bytes, int]] = []
        for entry in os.scandir(self._folder):
            stem, suffix = os.path.splitext(entry.name)
            if suffix == _TEMPORARY:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
            elif suffix == _SUFFIX and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(ValueError, OSError):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime, bytes.fromhex(stem), stat.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self._bytes += size
        self._make_room(0)

    def _write_all(self) -> None:
        while True:
            item = self._queue.get()
            try:
                if item is None:
                    return
                self._write(*item)
            except OSError as error:
                self.dropped_writes += 1
                log.warning("a prompt could not be cached on disk", folder=str(self._folder), error=str(error))
            finally:
                self._queue.task_done()

    def _write(self, name: bytes, block: FileBlock) -> None:
        if name in self._sizes:
            return
        data = encode_block(name, block)
        if len(data) > self._max_bytes:
            return
        self._make_room(len(data))
        with whole_file(self._path(name), mode=0o600, suffix=_TEMPORARY) as file:
            file.write(data)
        _mark_used(self._path(name))
        with self._lock:
            self._sizes[name] = len(data)
            self._bytes += len(data)

    def _make_room(self, wanted: int) -> None:
        while self._bytes + wanted > self._max_bytes and self._sizes:
            self._remove(next(iter(self._sizes)))

    def _remove(self, name: bytes) -> None:
        with self._lock:
            self._bytes -= self._sizes.pop(name, 0)
        with contextlib.suppress(OSError):
            self._path(name).unlink()


def _mark_used(path: Path) -> None:
    now = time.time_ns()  # finer than the clock that file systems stamp with
    os.utime(path, ns=(now, now))
