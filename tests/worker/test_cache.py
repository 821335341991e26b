"""What a worker keeps of what it was sent. Run: .venv/bin/pytest tests/worker/test_cache.py"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint

from titan.common.arrays import DISK_DTYPES
from titan.common.errors import ConfigError, ExpertLost
from titan.common.registry import ModelShape, open_checkpoint
from titan.common.registry.headers import read_header
from titan.common.store import ExpertStore
from titan.worker import cache as cache_module
from titan.worker.cache import ExpertCache
from titan.worker.kept import KeptExperts

ALL = {0: range(8), 1: range(8)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpertStore]:
    path = tmp_path_factory.mktemp("model") / "mini"
    make_checkpoint(path, layers=2, experts=8, hidden=128, width=64)
    opened = ExpertStore(open_checkpoint(path))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpertStore]:
    path = tmp_path_factory.mktemp("other") / "mini"
    make_checkpoint(path, layers=2, experts=8, hidden=128, width=64, seed=9)
    opened = ExpertStore(open_checkpoint(path))
    yield opened
    opened.close()


def keep(cache: ExpertCache, store: ExpertStore, *experts: int, layer: int = 0, wanted: object = None) -> None:
    for expert in experts:
        data = store.read_bytes(layer, expert)
        cache.keep(store.checkpoint.shape, layer, expert, data, ALL if wanted is None else wanted)  # type: ignore[arg-type]


def shape_of(store: ExpertStore) -> ModelShape:
    return store.checkpoint.shape


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


def test_what_was_kept_comes_back_after_a_restart(tmp_path: Path, store: ExpertStore) -> None:
    cache = ExpertCache(tmp_path / "cache", 1 << 30)
    assert cache.read(shape_of(store), 0, 3) is None
    keep(cache, store, 3, 5)
    keep(cache, store, 3, layer=1)
    keep(cache, store, 3)  # twice is once
    assert (cache.experts, cache.counts.written) == (3, 3)
    assert cache.used_bytes == sum(path.stat().st_size for path in files(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="another worker"):
        ExpertCache(tmp_path / "cache", 1 << 30)
    cache.close()
    stale = files(tmp_path / "cache")[0].with_suffix(".safetensors.tmp")
    stale.write_bytes(b"half")
    (tmp_path / "cache" / "README").write_text("somebody else's")
    again = ExpertCache(tmp_path / "cache", 1 << 30)
    assert not stale.exists()
    assert (tmp_path / "cache" / "README").exists()
    for layer, expert in ((0, 3), (0, 5), (1, 3)):
        assert again.read(shape_of(store), layer, expert) == store.read_bytes(layer, expert)
    assert again.read(shape_of(store), 1, 5) is None
    assert again.counts.read == 3
    header = read_header(files(tmp_path / "cache")[0])  # anybody can read what lies there
    assert any(name.endswith("experts.3.gate_proj.weight") for name in header.tensors)
    again.close()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)


def link_elsewhere(path: Path) -> None:
    copy = path.rename(path.with_name("copy"))
    path.symlink_to(copy)


@pytest.mark.parametrize(
    "damage", [flip, swap_header, lambda p: os.truncate(p, 5000), lambda p: p.unlink(), link_elsewhere]
)
def test_a_damaged_file_is_never_used(tmp_path: Path, store: ExpertStore, damage: Callable[[Path], object]) -> None:
    cache = ExpertCache(tmp_path, 1 << 30)
    keep(cache, store, 1, 2)
    damage(files(tmp_path)[0])
    assert cache.read(shape_of(store), 0, 1) is None
    assert cache.counts.damaged == 1
    assert cache.read(shape_of(store), 0, 2) == store.read_bytes(0, 2)
    keep(cache, store, 1)  # it was sent again
    assert cache.read(shape_of(store), 0, 1) == store.read_bytes(0, 1)
    assert cache.used_bytes == sum(path.stat().st_size for path in files(tmp_path))
    cache.close()


def test_two_checkpoints_share_the_bound(tmp_path: Path, store: ExpertStore, other: ExpertStore) -> None:
    cache = ExpertCache(tmp_path, 1 << 30)
    keep(cache, store, 0)
    size = cache.used_bytes
    cache.close()
    cache = ExpertCache(tmp_path, 3 * size)
    keep(cache, other, 0, 1)
    assert cache.experts == 3
    assert cache.read(shape_of(store), 0, 0) is not None  # used: the other model's goes first
    keep(cache, store, 1, wanted={0: [0, 1, 2, 3]})
    assert cache.read(shape_of(other), 0, 0) is None
    keep(cache, store, 2, wanted={0: [0, 1, 2, 3]})
    keep(cache, store, 3, wanted={0: [0, 1, 2, 3]})  # no room is made at the cost of what is wanted too
    assert (cache.counts.skipped, cache.counts.evicted) == (1, 2)
    assert [cache.read(shape_of(store), 0, e) is not None for e in range(4)] == [True, True, True, False]
    assert cache.used_bytes <= 3 * size
    cache.close()
    smaller = ExpertCache(tmp_path, size)  # the bound was lowered
    assert smaller.experts == 1
    assert smaller.read(shape_of(store), 0, 2) is not None  # the newest
    smaller.close()
    tiny = ExpertCache(tmp_path, size - 1)
    keep(tiny, store, 4)
    assert (tiny.experts, tiny.counts.skipped, files(tmp_path)) == (0, 1, [])
    tiny.close()


def test_a_full_disk_costs_a_warning(
    tmp_path: Path, store: ExpertStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ExpertCache(tmp_path, 1 << 30)
    keep(cache, store, 0)
    real = cache_module.pwrite_all

    def full(_fd: int, _data: object, _offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module, "pwrite_all", full)
    keep(cache, store, 1, 2, 3)
    assert (cache.counts.skipped, cache.experts, len(files(tmp_path))) == (3, 1, 1)
    assert sum("more than its disk has left" in record.message for record in caplog.records) == 1
    assert not list(tmp_path.glob("*/*.tmp"))
    monkeypatch.setattr(cache_module, "pwrite_all", real)
    keep(cache, store, 1)
    assert cache.read(shape_of(store), 0, 1) == store.read_bytes(0, 1)
    cache.close()


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used as a cache"):
        ExpertCache(tmp_path / "file", 1)


def slot_of(store: ExpertStore, layer: int = 0) -> list[np.ndarray]:
    spec = store.checkpoint.shape.layer(layer)
    return [np.zeros(c.shape, DISK_DTYPES[c.dtype][0]) for m in spec.matrices for c in m.components]


def test_experts_are_read_into_slots_and_what_is_damaged_is_lost(tmp_path: Path, store: ExpertStore) -> None:
    cache = ExpertCache(tmp_path / "cache", 1 << 30)
    keep(cache, store, 0, 1, 2, 3, 4)
    expected, slot = store.read_bytes(0, 4), slot_of(store)
    assert cache.read_into(shape_of(store), 0, 4, slot, drop_pages=True)
    assert b"".join(part.tobytes() for part in slot) == bytes(expected)
    paths = files(tmp_path / "cache")
    flipped = bytearray(paths[0].read_bytes())
    flipped[-5000] ^= 1
    paths[0].write_bytes(flipped)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].unlink()
    paths[3].write_bytes(b"\xff" * paths[3].stat().st_size)
    for expert in range(4):
        assert not cache.read_into(shape_of(store), 0, expert, slot)
        assert not cache.has(shape_of(store), 0, expert)
    assert (cache.counts.damaged, cache.experts) == (4, 1)
    assert files(tmp_path / "cache") == [paths[4]]
    assert not cache.read_into(shape_of(store), 0, 7, slot), "what never came"
    kept = KeptExperts(cache, shape_of(store))
    wide = [np.zeros(part.shape, np.float32) if part.dtype == np.uint16 else part for part in slot_of(store)]
    kept.read_expert(0, 4, wide)
    direct = [np.zeros_like(part) for part in wide]
    store.read_expert(0, 4, direct)
    for mine, theirs in zip(wide, direct, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(ExpertLost, match="expert 2 of layer 0"):
        kept.read_expert(0, 2, slot)


@pytest.mark.parametrize(("room", "expected"), [(0, [0, 0]), (1, [1, 0]), (5, [3, 2]), (99, [8, 3])])
def test_every_layer_has_its_part_of_a_small_disk(
    tmp_path: Path, store: ExpertStore, room: int, expected: list[int]
) -> None:
    keep(cache := ExpertCache(tmp_path / "cache", 1 << 30), store, 0)
    cache.limit_bytes = room * files(tmp_path / "cache")[0].stat().st_size
    found = cache.affordable(shape_of(store), {0: range(8), 1: (2, 5, 7)})
    assert [len(found[layer]) for layer in (0, 1)] == expected
