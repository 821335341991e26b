"""Writing the files of a pack: preallocated, synced, and with a full disk named as such. Knows no experts."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.common.errors import DiskFull, StoreError
from titan.common.units import format_bytes

COPY_BYTES = 8 << 20


@contextmanager
def written(path: Path, nbytes: int) -> Iterator[int]:
    """A descriptor for positional writes to a new file of `nbytes`; it gets its name when all has been synced.

    Raises:
        DiskFull, StoreError: the file system cannot take it; nothing of that name is left.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with disk_errors(path, nbytes):
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _allocate(descriptor, nbytes)
            yield descriptor
            os.fsync(descriptor)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        sync_directory(path.parent)


@contextmanager
def disk_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Name what the operating system refuses while `path` is written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"{path} needs {format_bytes(nbytes)}, more than its disk has left", "Free some space and run it again"
            ) from error
        raise StoreError(
            f"{path} cannot be written ({error.strerror})", "Check the disk and its permissions"
        ) from error


def pwrite_all(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def copy_range(source: int, offset: int, nbytes: int, target: int, target_offset: int) -> None:
    """Copy bytes between descriptors; raises OSError when the source ends early."""
    done = 0
    while done < nbytes:
        part = os.pread(source, min(COPY_BYTES, nbytes - done), offset + done)
        if not part:
            raise OSError(errno.EIO, "the file ends early")
        pwrite_all(target, part, target_offset + done)
        done += len(part)


def write_text(path: Path, text: str) -> None:
    data = text.encode()
    with written(path, len(data)) as descriptor:
        pwrite_all(descriptor, data, 0)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _allocate(descriptor: int, nbytes: int) -> None:
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    os.ftruncate(descriptor, nbytes)
