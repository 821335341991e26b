"""Scatter reads: ranges of files straight into the memory of slots, neighbours in one system call.

Knows offsets and buffers; nothing of what is in them.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan.common.errors import CheckpointChanged
from titan.common.platform import drop_cached
from titan.common.store.files import CacheMode, OpenFile, ShardFiles

__all__ = ["MAX_RUN_BYTES", "NO_WAIT", "Segment", "read_at_once", "read_run", "runs_of"]

MAX_VECTORS = 1024  # IOV_MAX on Linux and macOS
MAX_RUN_BYTES = 32 << 20  # what a call reads at most; also the size of a reader's aligned buffer with O_DIRECT
MAX_GAP_BYTES = 4096  # padding between two experts of a pack is read over
ALIGNMENT_BYTES = 4096  # of offset, length and memory with O_DIRECT
NO_WAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # of preadv: what the page cache has, or EAGAIN; Linux
_thread = threading.local()


class Segment(NamedTuple):
    """`nbytes` bytes at `offset` of `path`, one buffer after another."""

    path: Path
    offset: int
    nbytes: int
    buffers: Sequence[np.ndarray]


def runs_of(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that can be read in one call each: neighbours in one file, at most a page between them."""
    runs: list[list[Segment]] = []
    path, end, vectors = None, 0, 0
    for segment in segments:
        near = segment.path == path and 0 <= segment.offset - end < MAX_GAP_BYTES
        near = near and segment.offset + segment.nbytes - runs[-1][0].offset <= MAX_RUN_BYTES
        vectors += 1 + len(segment.buffers)  # a gap takes one too
        if near and vectors <= MAX_VECTORS:
            runs[-1].append(segment)
        else:
            runs.append([segment])
            vectors = len(segment.buffers)
        path, end = segment.path, segment.offset + segment.nbytes
    return runs


def read_run(files: ShardFiles, run: Sequence[Segment]) -> int:
    """Fill the buffers of a run; returns the system calls it took.

    Raises:
        OSError: the operating system could not read.
        CheckpointChanged: the file ends early.
    """
    file = files.get(run[0].path)
    if file.mode is CacheMode.DIRECT:
        try:
            return _read_direct(file, run)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            file = files.without_direct(file)
    calls = _read_vectors(file, run)
    if file.mode is not CacheMode.PAGE_CACHE:
        drop_cached(file.fd, run[0].offset, _end(run) - run[0].offset)
    return calls


def read_at_once(fd: int, segment: Segment) -> bool:
    """Fill a segment's buffers from the page cache without waiting for a disk; False when it is not all there.

    Raises:
        OSError: EOPNOTSUPP when the file system cannot be asked that.
    """
    assert NO_WAIT is not None, "not on this system"
    try:
        return os.preadv(fd, segment.buffers, segment.offset, NO_WAIT) == segment.nbytes  # type: ignore[arg-type]  # arrays are buffers
    except BlockingIOError:
        return False


def _end(run: Sequence[Segment]) -> int:
    return run[-1].offset + run[-1].nbytes


def _vectors(run: Sequence[Segment]) -> Sequence[Any]:
    if len(run) == 1:
        return run[0].buffers
    vectors: list[Any] = []
    end = run[0].offset
    for segment in run:
        if segment.offset > end:
            vectors.append(bytearray(segment.offset - end))
        vectors.extend(segment.buffers)
        end = segment.offset + segment.nbytes
    return vectors


def _read_vectors(file: OpenFile, run: Sequence[Segment]) -> int:
    offset, vectors = run[0].offset, _vectors(run)
    wanted = _end(run) - offset
    done = os.preadv(file.fd, vectors, offset)
    calls = 1
    if done == wanted:
        return calls
    views = [memoryview(v).cast("B") for v in vectors]
    while done < wanted:
        count = os.preadv(file.fd, _after(views, done), offset + done)
        if count == 0:
            raise _ends(file, offset + wanted)
        done += count
        calls += 1
    return calls


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest


def _read_direct(file: OpenFile, run: Sequence[Segment]) -> int:
    """Through an aligned buffer of this thread: slots need not lie at multiples of 4 KiB, O_DIRECT demands it."""
    start = run[0].offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    stop = -(-_end(run) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    buffer = _aligned_buffer(stop - start)
    done = calls = 0
    while start + done < _end(run):
        count = os.preadv(file.fd, [memoryview(buffer)[done : stop - start]], start + done)
        if count == 0:
            raise _ends(file, _end(run))
        done += count
        calls += 1
        if done % ALIGNMENT_BYTES and start + done < _end(run):
            done -= done % ALIGNMENT_BYTES  # a short read: go on at a boundary
            if count < ALIGNMENT_BYTES:
                raise _ends(file, _end(run))
    view = memoryview(buffer)
    for segment in run:
        place = segment.offset - start
        for target in segment.buffers:
            end = place + target.nbytes
            memoryview(target).cast("B")[:] = view[place:end]  # type: ignore[arg-type]  # an array is a buffer
            place = end
    return calls


def _aligned_buffer(nbytes: int) -> mmap.mmap:
    buffer: mmap.mmap | None = getattr(_thread, "buffer", None)
    if buffer is None or len(buffer) < nbytes:
        buffer = mmap.mmap(-1, nbytes)
        _thread.buffer = buffer
    return buffer


def _ends(file: OpenFile, where: int) -> CheckpointChanged:
    return CheckpointChanged(
        f"{file.path} ends before byte {where}", "The file changed while it was in use; restore it and start again"
    )
