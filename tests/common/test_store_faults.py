"""Disks that fail: retries, other copies, wrong bytes that never reach a slot, modes that a file system refuses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint

from titan.common.arrays import DISK_DTYPES
from titan.common.errors import CheckpointChanged, ChecksumMismatch, StoreError
from titan.common.pack import write_pack
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.store import CacheMode, ExpertStore, ReaderPool
from titan.common.store.scatter import Segment, runs_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("store") / "model"))


def targets(checkpoint: Checkpoint) -> list[np.ndarray]:
    return [
        np.zeros(c.shape, DISK_DTYPES[c.dtype][0])
        for matrix in checkpoint.shape.layers[0].matrices
        for c in matrix.components
    ]


def expected(checkpoint: Checkpoint, expert: int) -> bytes:
    data = b""
    for part in checkpoint.ranges(0, expert):
        data += part.file.read_bytes()[part.offset : part.offset + part.nbytes]
    return data


def read(store: ExpertStore, expert: int) -> bytes:
    views = targets(store.checkpoint)
    store.read_expert(0, expert, views)
    return b"".join(view.tobytes() for view in views)


class Disk:
    """os.preadv that fails with `error` on descriptors of `path`, `times` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, error: int, times: int) -> None:
        self.calls = 0
        self.short: int | None = None
        real = os.preadv

        def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}") == str(path):
                self.calls += 1
                if self.calls <= times:
                    raise OSError(error, os.strerror(error))
                if self.short is not None:
                    return real(fd, [memoryview(buffers[0]).cast("B")[: self.short]], offset)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)


def test_an_unreadable_sector_is_tried_again(source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, source.shards[0].path, errno.EIO, times=1)
    store = ExpertStore(source)
    assert read(store, 3) == expected(source, 3)
    assert store.counts.retries == 1
    store.close()


def test_a_dead_disk_is_named(source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, source.shards[0].path, errno.EIO, times=1 << 30)
    store = ExpertStore(source)
    with pytest.raises(StoreError, match=r"at \d+ of .*model\.safetensors failed \(Input/output error\)"):
        read(store, 3)
    store.close()


def test_what_one_copy_cannot_read_another_does(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = write_pack(source, tmp_path / "pack")
    Disk(monkeypatch, source.shards[0].path, errno.EIO, times=1 << 30)
    store = ExpertStore(source, copies=[packed])
    assert read(store, 5) == expected(source, 5)
    assert store.counts.other_copy == 1
    store.close()


def test_a_copy_of_another_model_is_refused(source: Checkpoint, tmp_path: Path) -> None:
    other = open_checkpoint(make_checkpoint(tmp_path / "other", seed=7))
    with pytest.raises(StoreError, match="not the same model"):
        ExpertStore(source, copies=[other])


@pytest.mark.parametrize("cache", list(CacheMode))
def test_short_reads_go_on_where_they_stopped(
    source: Checkpoint, tmp_path: Path, cache: CacheMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = write_pack(source, tmp_path / "pack")
    disk = Disk(monkeypatch, packed.ranges(0, 0)[0].file, 0, times=0)
    disk.short = 4096
    store = ExpertStore(packed, cache=cache)
    assert read(store, 2) == expected(source, 2)
    assert disk.calls > 5
    store.close()


def wreck(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def test_wrong_bytes_take_a_copy_out_of_use_and_the_other_answers(source: Checkpoint, tmp_path: Path) -> None:
    path = write_pack(source, tmp_path / "pack").path
    part = open_checkpoint(path).ranges(0, 4)[6]
    wreck(part.file, part.offset)
    store = ExpertStore(open_checkpoint(path))
    assert read(store, 1) == expected(source, 1)
    assert store.counts.other_copy == 0
    assert read(store, 4) == expected(source, 4)
    assert read(store, 2) == expected(source, 2)
    assert (store.counts.mismatches, store.counts.other_copy) == (1, 2)
    store.close()


def test_wrong_bytes_without_another_copy_are_an_error(tmp_path: Path) -> None:
    model = open_checkpoint(make_checkpoint(tmp_path / "model"))
    path = write_pack(model, tmp_path / "pack").path
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    part = open_checkpoint(path).ranges(0, 4)[0]
    wreck(part.file, part.offset)
    for verify in ("first", "always"):
        store = ExpertStore(open_checkpoint(path), verify=verify)
        with pytest.raises(ChecksumMismatch, match=r"expert 4 of layer 0 in .*experts-00001"):
            read(store, 4)
        store.close()
    store = ExpertStore(open_checkpoint(path), verify="never")
    assert zlib.crc32(read(store, 4)) != open_checkpoint(path).pack.checksums[0][4]  # type: ignore[union-attr]
    store.close()


def test_a_file_system_without_direct_reads_falls_back_and_counts(
    source: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def no_direct(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_direct)
    store = ExpertStore(source, cache=CacheMode.DIRECT)
    assert read(store, 6) == expected(source, 6)
    assert store.fallbacks == 1
    assert "gentler cache mode" in caplog.text
    store.close()


def test_direct_reads_that_are_refused_fall_back_too(source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, source.shards[0].path, errno.EINVAL, times=1)
    before = len(os.listdir("/dev/fd"))
    store = ExpertStore(source, cache=CacheMode.DIRECT)
    assert read(store, 6) == expected(source, 6)
    assert store.fallbacks == 1
    assert disk.calls > 1
    store.close()
    assert len(os.listdir("/dev/fd")) == before


def test_out_of_descriptors_says_so(source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    store = ExpertStore(source)
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(StoreError, match=r"Too many open files.*ulimit -n"):
        read(store, 0)


def test_neighbours_are_read_in_one_call(source: Checkpoint, tmp_path: Path) -> None:
    packed = write_pack(source, tmp_path / "pack")
    for checkpoint, most in ((packed, 2), (source, 2 * 9)):
        store = ExpertStore(checkpoint)
        views = [targets(checkpoint) for _ in range(3)]
        store.read_experts(0, [5, 2, 4], views)  # 4 and 5 lie side by side
        for expert, view in zip((5, 2, 4), views, strict=True):
            assert b"".join(v.tobytes() for v in view) == expected(source, expert)
        assert store.counts.reads <= most
        store.close()


def test_runs_stay_below_the_systems_limit_of_vectors() -> None:
    buffer = np.zeros(16, np.uint8)
    segments = [Segment(Path("a"), 16 * i, 16, [buffer]) for i in range(2000)]
    assert [len(run) for run in runs_of(segments)] == [512, 512, 512, 464]
    big = np.zeros(12 << 20, np.uint8)
    assert [len(run) for run in runs_of([Segment(Path("a"), i * big.nbytes, big.nbytes, [big]) for i in range(5)])] == [
        2,
        2,
        1,
    ]
    apart = [("a", 0), ("b", 16), ("b", 8000)]
    assert len(runs_of([Segment(Path(name), offset, 16, [buffer]) for name, offset in apart])) == 3


def test_the_pool_runs_demand_before_prefetch_and_keeps_a_reader_for_it() -> None:
    pool = ReaderPool(2)
    gate, order = threading.Event(), []
    first = pool.prefetch(lambda: (gate.wait(10), order.append("prefetch 1")))  # type: ignore[arg-type, return-value]
    second = pool.prefetch(lambda: order.append("prefetch 2"))
    pool.run_all([lambda n=n: order.append(n) for n in range(4)])  # would hang if prefetch held both readers
    assert sorted(order) == [0, 1, 2, 3]
    assert second.cancel()
    assert not second.cancel()
    gate.set()
    first.wait()
    assert order[-1] == "prefetch 1"
    assert not first.cancel()
    pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("titan-reader")]


def test_the_pool_raises_the_first_error_after_all_jobs_have_ended() -> None:
    pool = ReaderPool(3)
    done: list[int] = []

    def job(n: int) -> None:
        done.append(n)
        if n in (1, 2):
            raise StoreError(f"job {n}")

    with pytest.raises(StoreError, match="job 1"):
        pool.run_all([lambda n=n: job(n) for n in range(5)])
    assert sorted(done) == [0, 1, 2, 3, 4]
    failed = pool.prefetch(lambda: job(2))
    with pytest.raises(StoreError, match="job 2"):
        failed.wait()
    pool.close()
    with pytest.raises(StoreError, match="closed"):
        pool.prefetch(lambda: None)


OUT_OF_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
import numpy as np
from titan.common.errors import StoreError
from titan.common.registry import open_checkpoint
from titan.common.store import ExpertStore

store = ExpertStore(open_checkpoint(Path(sys.argv[1])))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (os.open(os.devnull, os.O_RDONLY) + 1, hard))
try:
    store.read_bytes(0, 3)
except StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(len(store.read_bytes(0, 3)))
"""


def test_at_the_real_limit_of_descriptors_it_says_so_and_goes_on_when_there_are_some(source: Checkpoint) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_DESCRIPTORS, str(source.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said, read_bytes = done.stdout.splitlines()
    assert "Too many open files" in said
    assert "ulimit -n" in said
    assert int(read_bytes) == source.shape.layers[0].expert_bytes


def test_a_file_that_shrinks_while_its_pages_are_cached_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model"))
    store = ExpertStore(checkpoint)
    views = [targets(checkpoint) for _ in range(2)]
    store.read_experts(0, [0, 7], views)
    end = max(part.offset + part.nbytes for part in checkpoint.ranges(0, 7))
    os.truncate(checkpoint.shards[0].path, end - 1)
    assert store.read_cached(0, [0, 7], views) == [1], "half an expert was taken for a whole one"
    with pytest.raises(CheckpointChanged, match="ends before byte"):
        store.read_experts(0, [7], views[1:])
    store.close()
