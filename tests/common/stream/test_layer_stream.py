"""Layers read past their slots: mlx-lm's bits, slot tables that stay right, faults in the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.generation import wait_until
from mlx_lm.utils import load_model

from titan.common.errors import DiskStalled, StoreError
from titan.common.experts import ExpertLayer
from titan.common.pack import write_pack
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import CacheMode, ExpertStore, ReaderPool
from titan.common.stream import LayerStream

EXPERTS, TOP_K, HIDDEN, LAYERS = 12, 3, 128, 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("stream") / "model"
    return open_checkpoint(make_checkpoint(path, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN))


@pytest.fixture(scope="module")
def references(checkpoint: Checkpoint) -> list[Callable[[mx.array, mx.array], mx.array]]:
    module: Any
    module, _ = load_model(checkpoint.path, lazy=True, model_config=dict(checkpoint.config_defaults))
    module.set_dtype(mx.float32)
    return [layer.mlp.switch_mlp for layer in module.model.layers]


class Rig:
    """All layers of a checkpoint over one stream; `before` is called with (layer, experts) before every read."""

    def __init__(
        self, checkpoint: Checkpoint, capacity: int, width: int, cache: CacheMode = CacheMode.PAGE_CACHE
    ) -> None:
        self.store = ExpertStore(checkpoint, cache=cache)
        self.pool = ReaderPool(2)
        self.before: Callable[[int, Sequence[int]], None] = lambda _layer, _experts: None
        self.reads: list[tuple[int, list[int]]] = []
        specs = checkpoint.shape.layers
        buffers = [LayerBuffers(specs[0], width, "float32") for _ in range(2)]
        self.stream = LayerStream(
            (buffers[0], buffers[1]), self._fill, self.pool, [s.index for s in specs], self.absent
        )
        self.stream.rates.scattered_s = 9.0
        self.layers = [
            ExpertLayer(LayerBuffers(spec, capacity, "float32"), self.store.read_expert, fill_many=self._slots)
            for spec in specs
        ]
        for layer in self.layers:
            layer.stream = self.stream
        self.elsewhere: set[int] = set()

    def absent(self, layer: int) -> list[int]:
        slots = self.layers[layer].table.slots
        return [e for e in range(EXPERTS) if e not in slots and e not in self.elsewhere]

    def _fill(self, layer: int, experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]]) -> None:
        self.reads.append((layer, list(experts)))
        self.before(layer, experts)
        self.store.read_experts(layer, experts, targets)

    def _slots(self, layer: int, experts: Sequence[int], targets: Sequence[Sequence[np.ndarray]]) -> None:
        self.before(layer, experts)
        self.store.read_experts(layer, experts, targets)

    def close(self) -> None:
        self.stream.close()
        self.pool.close()
        self.store.close()


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **options: Any) -> Rig:
        made.append(Rig(*args, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def batch(rows: int, seed: int) -> tuple[mx.array, mx.array]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, HIDDEN), dtype=np.float32)
    indices = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(rows)])
    return mx.array(x), mx.array(indices.astype(np.uint32))


def check(rig: Rig, references: list[Any], layer: int, rows: int, seed: int) -> None:
    x, indices = batch(rows, seed)
    y = rig.layers[layer].run_rows(x, np.array(indices))
    np.testing.assert_array_equal(np.array(y), np.array(references[layer](x, indices)))


def check_slots(rig: Rig, checkpoint: Checkpoint) -> None:
    """Every mapped slot holds its expert's bytes."""
    for spec, layer in zip(checkpoint.shape.layers, rig.layers, strict=True):
        layer.settle()
        truth = LayerBuffers(spec, 1, "float32")
        assert len(set(layer.table.slots.values())) == len(layer.table.slots) <= layer.table.capacity
        assert not layer.table.reserved
        for expert, slot in layer.table.slots.items():
            rig.store.read_expert(spec.index, expert, truth.targets(0))
            for mine, theirs in zip(layer.buffers.targets(slot), truth.targets(0), strict=True):
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("capacity", "width"), [(3, 2), (3, EXPERTS), (5, 4), (8, 5)])
@pytest.mark.parametrize("packed", [False, True])
def test_prompts_and_the_steps_after_them_equal_mlx_lm(
    checkpoint: Checkpoint, references: list[Any], rigs: Any, tmp_path: Path, capacity: int, width: int, packed: bool
) -> None:
    read = write_pack(checkpoint, tmp_path / "pack") if packed else checkpoint
    rig = rigs(read, capacity, width, CacheMode.DIRECT if packed else CacheMode.PAGE_CACHE)
    rig.layers[1].pin([4, 7])
    for seed, rows in enumerate((40, 1, 1, 25, 1, 30)):
        for layer in range(LAYERS):
            check(rig, references, layer, rows, 10 * seed + layer)
        check_slots(rig, checkpoint)
    assert all(layer.table.counts.streamed for layer in rig.layers)


def test_the_experts_chosen_last_stay(checkpoint: Checkpoint, references: list[Any], rigs: Any) -> None:
    rig = rigs(checkpoint, 4, 5)
    for layer, seed in ((0, 1), (1, 2), (2, 3), (0, 4), (1, 5), (2, 6)):
        x, indices = batch(40, seed)
        rig.layers[layer].run_rows(x, np.array(indices))
        assert set(np.array(indices)[-1].tolist()) <= set(rig.layers[layer].table.slots)
        assert len(rig.layers[layer].table.slots) == 4


def test_the_next_layer_is_read_ahead_once(checkpoint: Checkpoint, references: list[Any], rigs: Any) -> None:
    rig = rigs(checkpoint, 3, EXPERTS)
    for layer in range(LAYERS):
        check(rig, references, layer, 40, layer)
        ahead = {index for index, _ in rig.reads}
        assert ahead == set(range(min(layer + 2, LAYERS)))
    for layer in range(LAYERS):
        read = [e for index, experts in rig.reads if index == layer for e in experts]
        assert sorted(read) == list(range(EXPERTS)), "an expert was read twice"
    assert rig.stream.wasted == 0


def test_only_the_share_of_this_machine_is_read(checkpoint: Checkpoint, references: list[Any], rigs: Any) -> None:
    rig = rigs(checkpoint, 3, EXPERTS)
    rig.elsewhere = {0, 1, 2, 3, 4, 5}
    for layer in range(LAYERS):
        x, indices = batch(40, layer)
        flat = np.array(indices).reshape(-1)
        mine = np.flatnonzero(~np.isin(flat, list(rig.elsewhere)))
        rows = np.repeat(np.arange(40, dtype=np.uint32), TOP_K)[mine]
        y = rig.layers[layer].run_pairs(x, rows, flat[mine], sort=True)
        expected = np.array(references[layer](x, indices)).reshape(-1, HIDDEN)[mine]
        np.testing.assert_array_equal(np.array(y), expected)
    read = {e for _, experts in rig.reads for e in experts}
    assert read == set(range(6, EXPERTS))


def test_the_dearer_way_is_not_taken(checkpoint: Checkpoint, references: list[Any], rigs: Any) -> None:
    rig = rigs(checkpoint, 3, 4)
    rig.stream.rates.sequential_s, rig.stream.rates.scattered_s = 9.0, 1e-9
    for layer in range(LAYERS):
        check(rig, references, layer, 40, layer)
    assert not rig.reads
    assert rig.layers[0].table.counts.loads == EXPERTS


def test_a_section_that_cannot_be_read_leaves_all_in_order(
    checkpoint: Checkpoint, references: list[Any], rigs: Any
) -> None:
    rig = rigs(checkpoint, 4, 4)
    bad = {6}

    def before(_layer: int, experts: Sequence[int]) -> None:
        if bad & set(experts):
            raise StoreError("reading failed", "check the disk")

    rig.before = before
    x, indices = batch(40, 5)
    for _ in range(3):  # buffers that leaked would be used up by now
        with pytest.raises(StoreError):
            rig.layers[0].run_rows(x, np.array(indices))
        check_slots(rig, checkpoint)
    bad.clear()
    for layer in range(LAYERS):
        check(rig, references, layer, 40, layer)
        check(rig, references, layer, 1, layer)


def test_what_could_not_be_read_ahead_is_read_when_it_is_needed(
    checkpoint: Checkpoint, references: list[Any], rigs: Any
) -> None:
    rig = rigs(checkpoint, 3, EXPERTS)
    failed = threading.Event()

    def before(layer: int, _experts: Sequence[int]) -> None:
        if layer == 1 and not failed.is_set():
            failed.set()
            raise StoreError("reading failed once", "check the disk")

    rig.before = before
    for layer in range(LAYERS):
        check(rig, references, layer, 40, layer)
    assert failed.is_set()


def test_a_pass_that_ends_early_leaves_nothing_behind(checkpoint: Checkpoint, references: list[Any], rigs: Any) -> None:
    rig = rigs(checkpoint, 3, 5)
    for seed in range(4):
        check(rig, references, 0, 40, seed)  # the next layer is being read, and never comes
    for layer in range(LAYERS):
        check(rig, references, layer, 40, layer)
    check_slots(rig, checkpoint)


def test_a_read_that_does_not_end_closes_this_way_until_it_has(
    checkpoint: Checkpoint, references: list[Any], rigs: Any
) -> None:
    rig = rigs(checkpoint, 3, 6)
    gate = threading.Event()
    rig.before = lambda _layer, experts: 0 in experts and gate.wait(20)
    rig.pool.deadline_s = 0.2
    x, indices = batch(40, 5)
    with pytest.raises(DiskStalled):
        rig.layers[0].run_rows(x, np.array(indices))
    before = len(rig.reads)
    rig.before = lambda _layer, _experts: None
    for layer in range(LAYERS):
        check(rig, references, layer, 40, layer)
    assert len(rig.reads) == before, "buffers are used that a reader may still write"
    gate.set()
    rig.pool.deadline_s = 30.0
    wait_until(lambda: rig.stream.pays(rig.layers[0].buffers.layer, range(8)), "the read to end")
    check(rig, references, 0, 40, 6)
    assert len(rig.reads) > before
