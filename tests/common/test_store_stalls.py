"""Disks that do not answer: waits end, no slot is used that may still be written, what comes back is used again."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.generation import wait_until
from fixtures.hanging_disk import HangingDisk

from titan.common.errors import DiskStalled
from titan.common.experts import ExpertLayer
from titan.common.pack import write_pack
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import CacheMode, ExpertStore, ReaderPool

DEADLINE_S = 0.1


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("stalls") / "model"))


@pytest.fixture
def pool() -> Iterator[ReaderPool]:
    made = ReaderPool(2, DEADLINE_S)
    yield made
    made.close()
    wait_until(lambda: not readers(), "the readers to end")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    made = HangingDisk(monkeypatch)
    yield made
    made.come_back()


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "titan-reader"]


def layer_of(store: ExpertStore, pool: ReaderPool, capacity: int) -> ExpertLayer:
    spec = store.checkpoint.shape.layers[0]
    return ExpertLayer(
        LayerBuffers(spec, capacity, "float32"),
        store.read_expert,
        None,
        pool,
        fill_many=store.read_experts,
        fill_cached=store.read_cached,
    )


def bytes_in(layer: ExpertLayer, expert: int) -> list[bytes]:
    return [view.tobytes() for view in layer.buffers.targets(layer.table.slots[expert])]


@pytest.fixture(scope="module")
def truth(source: Checkpoint) -> Callable[[int], list[bytes]]:
    """What the slot of an expert of layer 0 must hold."""
    store = ExpertStore(source)
    found = []
    for expert in range(source.shape.num_experts):
        views = LayerBuffers(source.shape.layers[0], 1, "float32").targets(0)
        store.read_expert(0, expert, views)
        found.append([view.tobytes() for view in views])
    store.close()
    return found.__getitem__


@pytest.mark.parametrize("cache", [CacheMode.PAGE_CACHE, CacheMode.DIRECT])
def test_a_disk_that_hangs_ends_the_wait_and_is_used_again_when_it_answers(
    source: Checkpoint, truth: Any, pool: ReaderPool, disk: HangingDisk, cache: CacheMode
) -> None:
    store = ExpertStore(source, cache=cache)
    layer = layer_of(store, pool, 6)
    layer.preload([0, 1])
    disk.hang(source.path)
    with pytest.raises(DiskStalled, match=r"model\.safetensors in 0\.1 s|does not answer"):
        layer.preload([2, 3, 4])
    assert (layer.table.lost, layer.table.free_slots) == (3, 1), "two readers hang, with three experts"
    assert (bytes_in(layer, 0), bytes_in(layer, 1)) == (truth(0), truth(1))
    began_s = time.monotonic()
    with pytest.raises(DiskStalled, match="not read while its disk does not answer"):
        layer.preload([5])
    assert time.monotonic() - began_s < DEADLINE_S, "a disk that is known to hang is waited for again"
    disk.come_back()
    wait_until(lambda: ended(layer), "the reads to end")
    layer.preload([2, 3, 4])
    assert layer.table.lost == 0
    for expert in range(5):
        assert bytes_in(layer, expert) == truth(expert)
    store.close()


def test_another_copy_answers_while_a_disk_hangs(
    source: Checkpoint, truth: Any, pool: ReaderPool, disk: HangingDisk, tmp_path: Path
) -> None:
    store = ExpertStore(write_pack(source, tmp_path / "pack"))
    layer = layer_of(store, pool, 6)
    disk.hang(tmp_path / "pack")
    layer.preload([2, 3])
    layer.preload([4, 5])
    assert store.counts.other_copy == 4
    assert layer.table.lost == 2
    disk.come_back()
    wait_until(lambda: ended(layer), "the reads to end")
    for expert in (2, 3, 4, 5):  # what came late went where nobody looks
        assert bytes_in(layer, expert) == truth(expert)
    layer.preload([6, 7])
    assert store.counts.other_copy == 4, "a disk that answers again is not used"
    store.close()


def test_an_expert_on_its_way_that_never_comes_costs_one_wait(
    source: Checkpoint, truth: Any, pool: ReaderPool, disk: HangingDisk
) -> None:
    store = ExpertStore(source)
    layer = layer_of(store, pool, 3)
    disk.hang(source.path)
    assert layer.incoming is not None
    assert layer.incoming.begin([1], keep=()) == [1]
    disk.wait_for(1)
    with pytest.raises(DiskStalled):
        layer.run_rows(row(source), np.array([[1, 2]], np.uint32))
    assert (len(layer.incoming), layer.table.lost) == (0, 2), "the one on its way, and the one that was read meanwhile"
    began = time.monotonic()
    with pytest.raises(DiskStalled):  # known to hang: nobody waits again
        layer.run_rows(row(source), np.array([[1, 2]], np.uint32))
    assert time.monotonic() - began < pool.deadline_s / 2
    disk.come_back()
    wait_until(lambda: ended(layer), "the reads to end")
    layer.run_rows(row(source), np.array([[1, 2]], np.uint32))
    assert layer.table.lost == 0
    assert (bytes_in(layer, 1), bytes_in(layer, 2)) == (truth(1), truth(2))
    store.close()


def ended(layer: ExpertLayer) -> bool:
    layer.overdue.regain()
    return layer.table.lost == 0


def row(checkpoint: Checkpoint) -> mx.array:
    return mx.ones((1, checkpoint.shape.hidden_size))


def test_what_is_cached_is_read_while_the_readers_are_busy(
    source: Checkpoint, truth: Any, pool: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ExpertStore(source)
    layer = layer_of(store, pool, 4)
    layer.preload([0])  # opens the file
    gate = threading.Event()
    tickets = pool.begin([lambda: gate.wait(20)] * 2)  # type: ignore[list-item]
    before = store.counts.at_once
    layer.preload([1, 2, 3])
    assert store.counts.at_once == before + 3
    assert bytes_in(layer, 2) == truth(2)
    gate.set()
    pool.finish(tickets)
    store.close()


@pytest.mark.parametrize("failure", [errno.EOPNOTSUPP, errno.EAGAIN, "short"])
def test_what_the_page_cache_does_not_give_at_once_the_readers_read(
    source: Checkpoint, truth: Any, pool: ReaderPool, failure: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if not flags:
            assert threading.current_thread().name == "titan-reader"
            return real(fd, buffers, offset)
        if failure == "short":
            return real(fd, [memoryview(buffers[0]).cast("B")[:16]], offset)
        raise OSError(failure, os.strerror(int(failure)))

    monkeypatch.setattr(os, "preadv", preadv)
    store = ExpertStore(source)
    layer = layer_of(store, pool, 4)
    for experts in ([0, 1], [2], [3]):
        layer.preload(experts)
    assert store.counts.at_once == 0
    assert store.counts.cannot_ask == (failure == errno.EOPNOTSUPP)
    monkeypatch.undo()
    for expert in range(4):
        assert bytes_in(layer, expert) == truth(expert)
    store.close()


def test_readers_that_hang_are_replaced_and_end_when_they_are_let_go() -> None:
    pool = ReaderPool(2, DEADLINE_S)
    gate = threading.Event()
    done: list[int] = []
    for _ in range(3):
        with pytest.raises(DiskStalled):
            pool.run_all([lambda: gate.wait(20)] * 4)  # type: ignore[list-item]
        pool.run_all([lambda n=n: done.append(n) for n in range(4)])
    assert len(done) == 12
    assert len(readers()) == 2 + 6
    gate.set()
    wait_until(lambda: len(readers()) == 2, "the spare readers to end")
    pool.run_all([lambda: None] * 4)
    pool.close()
    assert not readers()


def test_a_queue_behind_readers_that_hang_has_a_deadline_too() -> None:
    pool = ReaderPool(2, DEADLINE_S)
    gate = threading.Event()
    stuck = pool.begin([lambda: gate.wait(20)] * 2)  # type: ignore[list-item]
    with pytest.raises(DiskStalled):
        pool.run_all([lambda: None])
    gate.set()
    pool.deadline_s = 20
    pool.finish(stuck)
    assert pool.call(lambda: 7) == 7
    pool.close()
