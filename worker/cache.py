"""Experts that were sent to this worker, kept on its disk: after a restart they need not come over the network again.

    DIR/FINGERPRINT/LAYER-EXPERT-CRC32.safetensors

Each file is a pack of one expert (`titan.common.pack.layout`). Together they are bounded in bytes, whatever model they
are of; the least recently used go first. A file counts only if name, header, length and checksum agree: any other is
removed, and the expert asked for again. A disk that is full or broken costs a warning. Knows no session and no slot.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan.common.errors import ConfigError, StoreError
from titan.common.log import get_logger
from titan.common.pack.files import disk_errors, pwrite_all
from titan.common.pack.layout import ShardLayout, plan_shards
from titan.common.platform import drop_cached
from titan.common.registry.families import FAMILIES
from titan.common.registry.shape import ModelShape
from titan.common.units import format_bytes

log = get_logger("worker.cache")

DEFAULT_BYTES = 64 << 30
MAX_FILES = 1_000_000
_FOLDER = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FILE = re.compile(r"(\d{5})-(\d{5})-([0-9a-f]{8})\.safetensors", re.ASCII)


class Key(NamedTuple):
    fingerprint: str
    layer: int
    expert: int


class _Kept(NamedTuple):
    path: Path
    crc: int
    nbytes: int


@dataclass(slots=True)
class CacheCounts:
    """Since start: experts read, written, thrown out, dropped as damaged, and not kept for want of room or disk."""

    read: int = 0
    written: int = 0
    evicted: int = 0
    damaged: int = 0
    skipped: int = 0


class ExpertCache:
    """Thread-safe; one process a folder.

    Args:
        folder: made when it is not there.
        limit_bytes: of all files together.

    Raises:
        ConfigError: the folder cannot be used, or another worker uses it.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.counts = CacheCounts()
        self._folder = folder
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._verified: set[Key] = set()  # whose checksum was right when they were read
        self._warned = False
        self._mutex = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be used as a cache ({error.strerror})", "give another --cache"
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._scan()
        except BlockingIOError as error:
            os.close(self._lock_fd)
            raise ConfigError(f"another worker uses the cache {folder}", "give each its own --cache") from error
        except OSError as error:
            os.close(self._lock_fd)
            raise ConfigError(f"{folder} cannot be read ({error.strerror})", "give another --cache") from error
        self._make_room(0, None, {})

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def experts(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        os.close(self._lock_fd)

    def read(self, shape: ModelShape, layer: int, expert: int) -> bytearray | None:
        """The expert's bytes as they were sent, or None when they are not here, or not any more what they were."""
        key = Key(shape.fingerprint, layer, expert)
        with self._mutex:
            kept = self._kept.get(key)
            if kept is None or shape.family not in FAMILIES:
                return None
            layout = _layout(shape, layer, expert)
            try:
                data = _read_checked(kept, layout, shape.layer(layer).expert_bytes)
                os.utime(kept.path)
            except (OSError, ValueError) as error:
                self.counts.damaged += 1
                log.warning(f"a kept expert is not what it was and is asked for again: {error}", file=str(kept.path))
                self._drop(key)
                return None
            self.counts.read += 1
            self._kept.move_to_end(key)
            return data

    def has(self, shape: ModelShape, layer: int, expert: int) -> bool:
        """Whether there is a file of it; what is in it shows when it is read."""
        return Key(shape.fingerprint, layer, expert) in self._kept

    def read_into(
        self, shape: ModelShape, layer: int, expert: int, views: Sequence[np.ndarray], *, drop_pages: bool = False
    ) -> bool:
        """Fill `views`, one a component as it is on disk, one after another; several threads at once.

        Returns whether that went well. What is not any more what was written is removed.

        Args:
            drop_pages: give the file's pages back to the system afterwards.
        """
        key = Key(shape.fingerprint, layer, expert)
        with self._mutex:
            kept, verified = self._kept.get(key), key in self._verified
            if kept is None:
                return False
            self._kept.move_to_end(key)
        try:
            crc = _read_views(kept, views, drop_pages=drop_pages, check=not verified)
            if not verified and crc != kept.crc:
                raise ValueError("its checksum is another one")
        except (OSError, ValueError) as error:
            with self._mutex:
                self.counts.damaged += 1
                log.warning(f"a kept expert cannot be read and is not served any more: {error}", file=str(kept.path))
                if self._kept.get(key) is kept:
                    self._drop(key)
            return False
        with self._mutex:
            self.counts.read += 1
            if self._kept.get(key) is kept:
                self._verified.add(key)
        return True

    def affordable(self, shape: ModelShape, wanted: Mapping[int, Collection[int]]) -> dict[int, frozenset[int]]:
        """Of the experts that are to be served from here, those that fit into the bound: every layer its part."""
        if not _FOLDER.fullmatch(shape.fingerprint) or shape.family not in FAMILIES:
            return {}
        sizes = {layer: _layout(shape, layer, shape.num_experts - 1).nbytes for layer in wanted}  # the longest names
        queues = {layer: sorted(experts) for layer, experts in wanted.items()}
        left, chosen = self.limit_bytes, {layer: set[int]() for layer in wanted}
        for rank in range(max(map(len, queues.values()), default=0)):
            for layer in sorted(queues):
                if rank < len(queues[layer]) and sizes[layer] <= left:
                    chosen[layer].add(queues[layer][rank])
                    left -= sizes[layer]
        return {layer: frozenset(experts) for layer, experts in chosen.items()}

    def keep(
        self, shape: ModelShape, layer: int, expert: int, data: bytearray, wanted: Mapping[int, Collection[int]]
    ) -> None:
        """Keep an expert's bytes, if there is room; never raises for the disk's sake.

        Args:
            wanted: layer -> experts of this model that make no room for others.
        """
        key = Key(shape.fingerprint, layer, expert)
        if not _FOLDER.fullmatch(shape.fingerprint) or shape.family not in FAMILIES:
            return
        with self._mutex:
            layout = _layout(shape, layer, expert)
            if key in self._kept:
                return
            if not self._make_room(layout.nbytes, shape.fingerprint, wanted):
                self.counts.skipped += 1
                return
            crc = zlib.crc32(data)
            path = self._folder / shape.fingerprint / f"{layer:05d}-{expert:05d}-{crc:08x}.safetensors"
            try:
                _write(path, layout, data)
            except StoreError as error:
                self.counts.skipped += 1
                if not self._warned:
                    self._warned = True
                    log.warning(f"experts are not kept: {error}")
                return
            self._warned = False
            self.counts.written += 1
            self._kept[key] = _Kept(path, crc, layout.nbytes)
            self._used_bytes += layout.nbytes

    # with the mutex -------------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        found: list[tuple[int, Key, _Kept]] = []
        for folder in self._folder.iterdir():
            if not _FOLDER.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
                continue
            for entry in os.scandir(folder):
                match = _FILE.fullmatch(entry.name)
                if match is None or not entry.is_file(follow_symlinks=False) or len(found) >= MAX_FILES:
                    if entry.name.endswith(".tmp"):  # of a process that ended while it wrote
                        os.unlink(entry.path)
                    continue
                status = entry.stat()
                key = Key(folder.name, int(match[1]), int(match[2]))
                found.append((status.st_mtime_ns, key, _Kept(Path(entry.path), int(match[3], 16), status.st_size)))
        for _, key, kept in sorted(found):
            if key in self._kept:  # two of one expert: the newer one counts
                self._drop(key)
            self._kept[key] = kept
            self._used_bytes += kept.nbytes
        log.info(
            "experts kept here", folder=str(self._folder), experts=len(self._kept), size=format_bytes(self._used_bytes)
        )

    def _make_room(self, nbytes: int, fingerprint: str | None, wanted: Mapping[int, Collection[int]]) -> bool:
        """Throw out what was not used for longest until `nbytes` more fit; False when that cannot be."""
        if nbytes > self.limit_bytes:
            return False
        spare = [k for k in self._kept if k.fingerprint != fingerprint or k.expert not in wanted.get(k.layer, ())]
        for key in spare:
            if self._used_bytes + nbytes <= self.limit_bytes:
                break
            self._drop(key)
            self.counts.evicted += 1
        return self._used_bytes + nbytes <= self.limit_bytes

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key)
        self._verified.discard(key)
        self._used_bytes -= kept.nbytes
        with contextlib.suppress(OSError):
            kept.path.unlink(missing_ok=True)


def _layout(shape: ModelShape, layer: int, expert: int) -> ShardLayout:
    return plan_shards(shape, {layer: [expert]})[0]


def _read_checked(kept: _Kept, layout: ShardLayout, expert_bytes: int) -> bytearray:
    """Raises ValueError when the file is not what was written, OSError when it cannot be read."""
    header, data = bytearray(len(layout.header)), bytearray(expert_bytes)
    fd = os.open(kept.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size != layout.nbytes:
            raise ValueError("its length is another one")
        for buffer, offset in ((header, 0), (data, layout.places[0][2])):
            view, done = memoryview(buffer), 0
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    raise ValueError("it ends early")
                done += count
    finally:
        os.close(fd)
    if bytes(header) != layout.header or zlib.crc32(data) != kept.crc:
        raise ValueError("header or checksum is another one")
    return data


def _read_views(kept: _Kept, views: Sequence[np.ndarray], *, drop_pages: bool, check: bool) -> int:
    """Read what lies behind the header; returns its checksum, 0 when it is not asked for.

    Raises:
        ValueError: the file is not as long as it was. OSError: it cannot be read.
    """
    fd = os.open(kept.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size != kept.nbytes:
            raise ValueError("its length is another one")
        offset = 8 + int.from_bytes(_read_exactly(fd, 8, 0), "little")
        parts = [memoryview(view).cast("B") for view in views if view.nbytes]  # type: ignore[arg-type]
        nbytes = sum(map(len, parts))
        if offset + nbytes > kept.nbytes:
            raise ValueError("its header is another one")
        done = os.preadv(fd, parts, offset)
        for part in parts:  # what a short read left
            skipped = min(done, len(part))
            done -= skipped
            if skipped < len(part):
                at = offset + skipped
                part[skipped:] = _read_exactly(fd, len(part) - skipped, at)
            offset += len(part)
        if drop_pages:
            drop_cached(fd, 0, kept.nbytes)
    finally:
        os.close(fd)
    crc = 0
    for part in parts if check else ():
        crc = zlib.crc32(part, crc)
    return crc


def _read_exactly(fd: int, nbytes: int, offset: int) -> bytes:
    """Raises ValueError when the file ends before."""
    data = b""
    while len(data) < nbytes:
        piece = os.pread(fd, nbytes - len(data), offset + len(data))
        if not piece:
            raise ValueError("it ends early")
        data += piece
    return data


def _write(path: Path, layout: ShardLayout, data: bytearray) -> None:
    """Raises StoreError (DiskFull) when the disk does not take it; nothing of it is left then.

    Not synced: what a power cut leaves half written has a wrong checksum.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with disk_errors(path, layout.nbytes):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                pwrite_all(fd, layout.header, 0)
                pwrite_all(fd, data, layout.places[0][2])
                os.ftruncate(fd, layout.nbytes)
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
