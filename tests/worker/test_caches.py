"""A worker's cache slots: experts read from its own copy, within the budget, exchanged while it executes.

Run: .venv/bin/pytest tests/worker/test_caches.py
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint

from titan.common.errors import MemoryBudgetError, StoreError, WireError, WorkerRefused
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.slots.buffers import slot_bytes
from titan.common.store import ExpertStore, ReaderPool
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.worker.engine import MLXThread
from titan.worker.holdings import Holdings
from titan.worker.own_copy import OwnCopy
from titan.worker.share import Cache, Share, read_share, union

HIDDEN, EXPERTS = 64, 8
SLOTS = 10  # of one layer: the budget


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("m") / "mini", hidden=HIDDEN, width=64))


@pytest.fixture
def mlx() -> Iterator[MLXThread]:
    thread = MLXThread()
    yield thread
    thread.close(10)


@pytest.fixture
def own(checkpoint: Checkpoint) -> Iterator[OwnCopy]:
    copy = OwnCopy(checkpoint.shape, ExpertStore(checkpoint), ReaderPool(2), "lfu")
    yield copy
    copy.close()


@pytest.fixture
def holdings(checkpoint: Checkpoint, mlx: MLXThread, own: OwnCopy) -> Holdings:
    budget = SLOTS * slot_bytes(checkpoint.shape.layers[0], "float32")
    return Holdings(checkpoint.shape, "float32", budget, mlx, own)


def install(holdings: Holdings, own: OwnCopy, share: Share) -> None:
    for step in holdings.plan(share):
        for expert, targets in holdings.begin(step).items():
            own.store.read_expert(step.layer, expert, targets)
        holdings.finish(step)
        assert holdings.resident_bytes <= holdings.budget_bytes


def run(holdings: Holdings, mlx: MLXThread, experts: list[int], layer: int = 0) -> np.ndarray:
    call = ExecuteCall(
        request_id=1,
        layer=layer,
        activations=np.random.default_rng(0).standard_normal((2, HIDDEN), np.float32),
        pair_rows=np.arange(len(experts), dtype=np.uint32) % 2,
        pair_experts=np.array(experts, np.uint32),
        sort=False,
        deadline_s=0.0,
    )
    outcome = mlx.run(lambda: holdings.execute([call]))[0]
    if not isinstance(outcome, ExecuteResult):
        raise outcome
    return outcome.outputs.copy()


def everything(checkpoint: Checkpoint, mlx: MLXThread, own: OwnCopy) -> Holdings:
    whole = Holdings(checkpoint.shape, "float32", 1 << 40, mlx, own)
    install(whole, own, Share({layer: frozenset(range(EXPERTS)) for layer in (0, 1)}))
    return whole


def test_the_same_bits_whatever_is_pinned_and_cached(
    checkpoint: Checkpoint, mlx: MLXThread, own: OwnCopy, holdings: Holdings
) -> None:
    whole = everything(checkpoint, mlx, own)
    rng = np.random.default_rng(1)
    all_experts = frozenset(range(EXPERTS))
    shares = [
        Share({}, {0: Cache(1, all_experts)}),
        Share({0: frozenset({1, 2})}, {0: Cache(2, all_experts - {1, 2}), 1: Cache(3, all_experts)}),
        Share({0: frozenset({2, 3})}, {0: Cache(2, all_experts - {2, 3}), 1: Cache(6, all_experts)}),
        Share({1: frozenset({0})}, {0: Cache(6, all_experts), 1: Cache(2, all_experts - {0})}),
        Share({0: frozenset({4, 5, 6})}, {0: Cache(1, all_experts - {4, 5, 6})}),
    ]
    for share in shares:
        install(holdings, own, share)
        for layer in share.caches:
            assert holdings.held(layer) == share.pinned.get(layer, frozenset())
            assert holdings.cache_slots(layer) == share.caches[layer].slots
            for size in (1, 3, EXPERTS):
                experts = rng.permutation(EXPERTS)[:size].tolist()
                np.testing.assert_array_equal(
                    run(holdings, mlx, experts, layer), run(whole, mlx, experts, layer), str((share, layer))
                )
            assert holdings.held(layer) == share.pinned.get(layer, frozenset()), "a pinned expert was evicted"


def test_what_is_cached_is_not_read_again_when_it_is_pinned_and_back(
    mlx: MLXThread, own: OwnCopy, holdings: Holdings
) -> None:
    rest = frozenset(range(EXPERTS)) - {0}
    install(holdings, own, Share({0: frozenset({0})}, {0: Cache(3, rest)}))
    run(holdings, mlx, [1, 2, 3])
    reads = own.store.counts.experts
    install(holdings, own, Share({0: frozenset({2})}, {0: Cache(3, frozenset(range(EXPERTS)) - {2})}))
    assert holdings.held(0) == {2}
    run(holdings, mlx, [0, 1, 2, 3])
    install(holdings, own, Share({0: frozenset({1, 2})}, {0: Cache(2, frozenset(range(EXPERTS)) - {1, 2})}))
    run(holdings, mlx, [0, 1, 2, 3])
    assert own.store.counts.experts == reads


def test_an_expert_that_is_neither_held_nor_served_is_refused(mlx: MLXThread, own: OwnCopy, holdings: Holdings) -> None:
    install(holdings, own, Share({0: frozenset({0})}, {0: Cache(2, frozenset({1, 2, 3}))}))
    run(holdings, mlx, [0, 1, 2, 3])
    with pytest.raises(WorkerRefused, match="are not held here"):
        run(holdings, mlx, [0, 4])
    install(holdings, own, Share({0: frozenset({0})}, {0: Cache(2, frozenset({4, 5}))}))
    with pytest.raises(WorkerRefused):
        run(holdings, mlx, [1])
    run(holdings, mlx, [4])


def test_what_cannot_be_is_refused_before_anything_changes(
    checkpoint: Checkpoint, mlx: MLXThread, own: OwnCopy, holdings: Holdings
) -> None:
    install(holdings, own, Share({0: frozenset({0})}))
    with pytest.raises(MemoryBudgetError, match="whose budget is"):
        holdings.plan(Share({0: frozenset({0})}, {0: Cache(SLOTS, frozenset({1}))}))
    bare = Holdings(checkpoint.shape, "float32", 1 << 40, mlx)
    with pytest.raises(WorkerRefused, match="nothing on its disk to read from"):
        bare.plan(Share({}, {0: Cache(1, frozenset({1}))}))
    run(holdings, mlx, [0])


def test_a_read_that_fails_costs_one_request(
    mlx: MLXThread, own: OwnCopy, holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(holdings, own, Share({}, {0: Cache(4, frozenset(range(EXPERTS)))}))
    expected = run(holdings, mlx, [1, 2])
    assert isinstance(own.store, ExpertStore)

    def fail(*_: object) -> None:
        raise StoreError("the disk is gone", "check it")

    with monkeypatch.context() as patch:
        patch.setattr(own.store, "_from", fail)
        patch.setattr(own.store._copies[0], "at_once", False)
        with pytest.raises(StoreError):
            run(holdings, mlx, [5, 6])
        np.testing.assert_array_equal(run(holdings, mlx, [1, 2]), expected)
    run(holdings, mlx, [5, 6, 7])
    np.testing.assert_array_equal(run(holdings, mlx, [1, 2]), expected)


@pytest.mark.parametrize(
    ("caches", "error"),
    [
        ([pb.LayerCache(layer=0, slots=0, experts=[1])], WireError),
        ([pb.LayerCache(layer=0, slots=EXPERTS + 1, experts=[1])], WireError),
        ([pb.LayerCache(layer=0, slots=2)], WireError),
        ([pb.LayerCache(layer=7, slots=2, experts=[1])], WorkerRefused),
        ([pb.LayerCache(layer=1, slots=2, experts=[EXPERTS])], WorkerRefused),
    ],
)
def test_a_cache_that_is_none_is_named(
    checkpoint: Checkpoint, caches: list[pb.LayerCache], error: type[Exception]
) -> None:
    with pytest.raises(error):
        read_share(pb.Assignment(caches=caches), checkpoint.shape)


def test_two_coordinators_share_the_larger_cache() -> None:
    one = Share({0: frozenset({1})}, {0: Cache(2, frozenset({2, 3}))})
    two = Share({0: frozenset({4}), 1: frozenset({0})}, {0: Cache(3, frozenset({3, 5}))})
    both = union([one, two])
    assert both.pinned == {0: {1, 4}, 1: {0}}
    assert both.caches == {0: Cache(3, frozenset({2, 3, 5}))}
    assert both.slots(0) == 5
    assert both.layers == [0, 1]
