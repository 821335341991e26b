"""ExpertLayer against mlx-lm's own SwitchGLU: bit-identical on CPU whatever the slots hold, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint
from mlx_lm.utils import load_model

from titan.common.errors import MemoryBudgetError, StoreError
from titan.common.experts import ExpertLayer
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.slots import POLICIES, make_policy
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import ExpertStore, ReaderPool

LAYER = 1
EXPERTS, TOP_K, HIDDEN = 8, 2, 128
PATH = f"model.layers.{LAYER}.mlp.switch_mlp"
VARIANTS: dict[str, dict[str, Any]] = {
    "4-bit": {},
    "group 32": {"group_size": 32},
    "group 128": {"group_size": 128},
    "8-bit float16": {"bits": 8, "dtype": "float16"},
    "unquantized": {"bits": None},
    "mixed": {
        "overrides": {
            f"{PATH}.gate_proj": {"bits": 8, "group_size": 32},
            f"{PATH}.up_proj": {"bits": 2, "group_size": 128},
            f"{PATH}.down_proj": False,
        }
    },
    "mxfp4": {"mode": "mxfp4", "group_size": 32},
}


class Case:
    """A checkpoint, its store, and mlx-lm's module for the same layer in float32."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(
            make_checkpoint(path, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, header_padding=1, **options)
        )
        module: Any
        module, _ = load_model(self.checkpoint.path, lazy=True, model_config=dict(self.checkpoint.config_defaults))
        module.set_dtype(mx.float32)
        self.reference: Callable[[mx.array, mx.array], mx.array] = module.model.layers[LAYER].mlp.switch_mlp
        self.store = ExpertStore(self.checkpoint)

    def layer(self, capacity: int, **options: Any) -> ExpertLayer:
        buffers = LayerBuffers(self.checkpoint.shape.layer(LAYER), capacity, "float32")
        return ExpertLayer(buffers, self.store.read_expert, **options)

    def check(self, layer: ExpertLayer, rows: int, seed: int, low: int = 0, high: int = EXPERTS) -> None:
        x, indices = batch(rows, seed, low, high)
        y = layer.run_rows(x, np.array(indices))
        np.testing.assert_array_equal(np.array(y), np.array(self.reference(x, indices)))


def batch(rows: int, seed: int, low: int = 0, high: int = EXPERTS) -> tuple[mx.array, mx.array]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, HIDDEN), dtype=np.float32)
    indices = np.stack([random.permutation(np.arange(low, high))[:TOP_K] for _ in range(rows)])
    return mx.array(x), mx.array(indices.astype(np.uint32))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("experts")
    return {name: Case(root / name.replace(" ", "-"), **options) for name, options in VARIANTS.items()}


@pytest.fixture
def case(cases: dict[str, Case]) -> Case:
    return cases["4-bit"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("capacity", [TOP_K, 5, EXPERTS])
def test_equals_mlx_lm_at_every_capacity(cases: dict[str, Case], variant: str, capacity: int) -> None:
    layer = cases[variant].layer(capacity)
    for seed, rows in enumerate((1, 3, 1, 40, 1, 5)):  # 40 rows are 80 pairs: sorted, and more experts than slots
        cases[variant].check(layer, rows, seed)
    assert layer.table.counts.hits > 0
    assert len(layer.table.slots) <= capacity


@pytest.mark.parametrize("capacity", [TOP_K, 5])
def test_running_what_is_there_while_the_rest_is_read_changes_nothing(case: Case, capacity: int) -> None:
    pool = ReaderPool(2)
    layer = case.layer(capacity, overlap=True, readers=pool)
    for seed, rows in enumerate((1, 1, 3, 1, 40, 1, 2)):
        case.check(layer, rows, seed)
    assert layer.table.counts.hits > 0
    pool.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_pinned_and_cached_experts_mix(case: Case, policy: str) -> None:
    layer = case.layer(5, policy=make_policy(policy, EXPERTS))
    layer.pin([6, 1, 3])
    for seed in range(20):
        case.check(layer, 1 + seed % 3, seed)
        assert layer.table.pinned == {1, 3, 6}
    loads = layer.table.counts.loads
    x, _ = batch(1, 0)
    layer.run_rows(x, np.array([[6, 3]], np.uint32))
    assert layer.table.counts.loads == loads, "a pinned expert was read again"


def test_a_wholly_pinned_layer_needs_no_look_up(case: Case) -> None:
    layer = case.layer(EXPERTS)
    layer.pin_all(EXPERTS)
    assert layer.whole
    assert layer.table.slots == {expert: expert for expert in range(EXPERTS)}
    case.check(layer, 3, 1)


@pytest.mark.parametrize("threads", [None, 3])
def test_readers_change_nothing(case: Case, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.common.store.layer_reads.PARALLEL_READ_BYTES", 0)
    pool = None if threads is None else ReaderPool(threads)
    layer = case.layer(4, readers=pool)
    for seed in range(10):
        case.check(layer, 4, seed)
    if pool is not None:
        pool.close()


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("capacity", [2, EXPERTS])
def test_pairs_equal_rows(case: Case, sort: bool, capacity: int) -> None:
    layer = case.layer(capacity)
    x, indices = batch(6, 4)
    reference = np.array(case.reference(x, indices))
    random = np.random.default_rng(1)
    flat = np.array(indices).reshape(-1)
    rows = np.repeat(np.arange(6, dtype=np.uint32), TOP_K)
    chosen = random.permutation(flat.size)[:9]
    y = layer.run_pairs(x, rows[chosen], flat[chosen], sort=sort)
    np.testing.assert_array_equal(np.array(y), reference.reshape(-1, HIDDEN)[chosen])


@pytest.mark.parametrize("capacity", [TOP_K, 5, 7])
def test_groups_follow_each_other_through_the_slots(case: Case, capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.common.store.layer_reads.PARALLEL_READ_BYTES", 0)  # several groups in flight at once
    pool = ReaderPool(1)
    layer = case.layer(capacity, readers=pool)
    for seed, rows in enumerate((40, 1, 25, 3, 40)):
        case.check(layer, rows, seed)
        layer.settle()
        truth = LayerBuffers(case.checkpoint.shape.layer(LAYER), 1, "float32")
        for expert, slot in layer.table.slots.items():
            case.store.read_expert(LAYER, expert, truth.targets(0))
            for mine, theirs in zip(layer.buffers.targets(slot), truth.targets(0), strict=True):
                np.testing.assert_array_equal(mine, theirs)
    pool.close()


def test_what_a_prompt_chose_last_stays(case: Case) -> None:
    layer = case.layer(TOP_K + 2)
    x, indices = batch(40, 3)
    layer.run_rows(x, np.array(indices))
    assert set(np.array(indices)[-1].tolist()) <= set(layer.table.slots)
    assert layer.table.counts.loads == EXPERTS


def test_no_slot_is_written_while_a_graph_that_reads_it_is_not_evaluated(case: Case) -> None:
    layer = case.layer(TOP_K)
    x, _ = batch(1, 9)
    pairs = [[0, 1], [1, 0], [2, 3], [0, 4], [5, 6], [6, 5], [0, 1]]
    outputs = [layer.run_rows(x, np.array([pair], np.uint32)) for pair in pairs]  # nothing is evaluated in between
    for pair, y in zip(pairs, outputs, strict=True):
        expected = case.reference(x, mx.array([pair], dtype=mx.uint32))
        np.testing.assert_array_equal(np.array(y), np.array(expected), err_msg=str(pair))


def failing(store: ExpertStore, bad: set[int]) -> Callable[[int, int, Sequence[np.ndarray]], None]:
    def fill(layer: int, expert: int, targets: Sequence[np.ndarray]) -> None:
        if expert in bad:
            raise StoreError("reading failed", "check the disk")
        store.read_expert(layer, expert, targets)

    return fill


@pytest.mark.parametrize("threads", [None, 3])
def test_a_failed_read_gives_its_slots_back_and_the_layer_goes_on(
    case: Case, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan.common.store.layer_reads.PARALLEL_READ_BYTES", 0)
    bad = {3}
    pool = None if threads is None else ReaderPool(threads)
    buffers = LayerBuffers(case.checkpoint.shape.layer(LAYER), TOP_K, "float32")
    layer = ExpertLayer(buffers, failing(case.store, bad), readers=pool)
    x, _ = batch(1, 0)
    for _ in range(4):  # slots that leaked would be used up by now
        with pytest.raises(StoreError):
            layer.run_rows(x, np.array([[2, 3]], np.uint32))
        assert 3 not in layer.table.slots
        case.check(layer, 1, 7, 4, 8)
    bad.clear()
    case.check(layer, 3, 8)
    if pool is not None:
        pool.close()


def test_no_slot_left_beside_the_pinned_is_a_named_error(case: Case) -> None:
    layer = case.layer(TOP_K)
    layer.pin([0, 1])
    x, _ = batch(1, 0)
    with pytest.raises(MemoryBudgetError, match="layer 1"):
        layer.run_rows(x, np.array([[0, 5]], np.uint32))
    case.check(layer, 1, 3, 0, 2)


def test_pinning_nothing_reads_nothing(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", layers=1, experts=4, top_k=2, hidden=256, width=1024)
    checkpoint = open_checkpoint(path)
    store, pool = ExpertStore(checkpoint), ReaderPool(2)
    try:
        layer = ExpertLayer(
            LayerBuffers(checkpoint.shape.layers[0], 2, "float32"),
            store.read_expert,
            readers=pool,
            fill_many=store.read_experts,
        )
        layer.pin([])
        assert store.counts.experts == 0
        assert layer.table.slots == {}
    finally:
        pool.close()
        store.close()


def test_preloaded_experts_are_there_and_go_in_reverse_order(case: Case) -> None:
    layer = case.layer(5)
    layer.pin([6])
    layer.preload([3, 1, 6, 0, 2, 4, 5])  # four slots are free
    assert set(layer.table.slots) == {6, 3, 1, 0, 2}
    assert layer.table.counts.installed == layer.table.counts.loads == 5
    assert layer.table.counts.stall_s == 0
    case.check(layer, rows=1, seed=1, low=4, high=6)  # experts 4 and 5 come in
    assert set(layer.table.slots) == {6, 3, 1, 4, 5}
    layer.preload([7])  # no slot is free: nothing is thrown out for it
    assert 7 not in layer.table.slots


def test_an_heir_takes_over_slots_and_counts(case: Case) -> None:
    old = case.layer(4)
    case.check(old, rows=1, seed=1, low=0, high=2)
    case.check(old, rows=1, seed=1, low=2, high=4)
    reads = case.store.counts.experts
    new = old.heir(LayerBuffers(old.buffers.layer, 3, "float32"))
    new.adopt(old, [1, 7], pin=True)
    new.adopt(old, [3, 2, 0])
    assert set(new.table.slots) == {1, 3, 2}
    assert new.table.pinned == {1}
    assert case.store.counts.experts == reads
    assert new.table.counts.misses == 4
    case.check(new, rows=4, seed=2)
    case.check(old, rows=4, seed=2)
