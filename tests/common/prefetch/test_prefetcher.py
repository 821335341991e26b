"""Prefetch over real slot tables and real reads: what is executed never changes, and silence where nothing pays."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint

from titan.common.errors import ConfigError, StoreError
from titan.common.experts import ExpertLayer
from titan.common.prediction import Oracle
from titan.common.prefetch.build import make_prefetcher
from titan.common.prefetch.prefetcher import Prefetcher
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import ExpertStore, ReaderPool

LAYERS, EXPERTS, TOP_K, HIDDEN = 3, 8, 2, 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("prefetch") / "model"
    return open_checkpoint(make_checkpoint(path, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, width=64))


class Setup:
    """Layers whose reads can be held up or made to fail."""

    def __init__(self, checkpoint: Checkpoint, capacity: int, readers: int = 3) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.bad: set[int] = set()
        self.begun: list[tuple[int, int]] = []
        self.store = ExpertStore(checkpoint)
        self.pool = ReaderPool(readers)
        self.layers = [
            ExpertLayer(LayerBuffers(spec, capacity, "float32"), self.fill, readers=self.pool)
            for spec in checkpoint.shape.layers
        ]

    def fill(self, layer: int, expert: int, targets: Sequence[np.ndarray]) -> None:
        self.begun.append((layer, expert))
        if not self.gate.wait(10):
            raise StoreError("the test never opened the gate")
        if expert in self.bad:
            raise StoreError("unreadable")
        self.store.read_expert(layer, expert, targets)

    def close(self) -> None:
        self.gate.set()
        self.pool.close()
        self.store.close()


@pytest.fixture
def setup(checkpoint: Checkpoint) -> Iterator[Setup]:
    setup = Setup(checkpoint, capacity=4)
    yield setup
    setup.close()


def begun(setup: Setup, count: int) -> None:
    deadline = threading.Event()
    for _ in range(1000):
        if len(setup.begun) >= count:
            return
        deadline.wait(0.01)
    raise AssertionError(f"{setup.begun} began, not {count}")


def test_what_arrives_in_time_is_a_hit(setup: Setup) -> None:
    layer = setup.layers[0]
    assert layer.incoming is not None
    assert layer.incoming.begin([5, 6], keep=()) == [5, 6]
    assert layer.incoming.begin([5], keep=()) == []
    begun(setup, 2)
    setup.pool.run_all([lambda: None, lambda: None])
    layer.run_rows(mx.zeros((1, HIDDEN)), np.array([[5, 6]], np.uint32))
    counts = layer.table.counts
    assert (counts.misses, counts.prefetched, counts.useful) == (0, 2, 2)


def test_what_is_needed_in_flight_is_waited_for_and_counted_late(setup: Setup) -> None:
    layer = setup.layers[0]
    assert layer.incoming is not None
    setup.gate.clear()
    layer.incoming.begin([5, 6], keep=())
    begun(setup, 2)
    threading.Timer(0.05, setup.gate.set).start()
    layer.run_rows(mx.zeros((1, HIDDEN)), np.array([[5, 1]], np.uint32))
    counts = layer.table.counts
    assert counts.late == 1
    assert 0 < counts.late_s <= counts.stall_s
    assert (counts.hits, counts.misses, counts.useful) == (1, 1, 1)


def test_what_is_missing_is_read_while_what_is_late_arrives(setup: Setup) -> None:
    layer = setup.layers[0]
    assert layer.incoming is not None
    setup.gate.clear()
    layer.incoming.begin([5], keep=())
    begun(setup, 1)
    opener = threading.Thread(target=lambda: (begun(setup, 2), setup.gate.set()))  # only once both reads have begun
    opener.start()
    layer.run_rows(mx.zeros((1, HIDDEN)), np.array([[5, 1]], np.uint32))
    opener.join()
    assert setup.begun == [(0, 5), (0, 1)]
    assert {1, 5} <= set(layer.table.slots)


def test_what_has_not_begun_is_taken_back_and_its_slots_serve_demand(setup: Setup) -> None:
    layer = setup.layers[0]
    assert layer.incoming is not None
    setup.gate.clear()
    layer.incoming.begin([4, 5, 6, 7], keep=())  # two readers for prefetch: 6 and 7 wait in the queue
    begun(setup, 2)
    threading.Timer(0.05, setup.gate.set).start()
    layer.run_rows(mx.zeros((1, HIDDEN)), np.array([[0, 1]], np.uint32))
    assert layer.table.counts.cancelled == 2
    assert {0, 1} <= set(layer.table.slots)
    assert (0, 6) not in setup.begun


def test_demand_gets_its_slots_even_when_prefetch_holds_them_all(setup: Setup) -> None:
    layer = setup.layers[0]
    assert layer.incoming is not None
    layer.pin([2, 3])
    setup.begun.clear()
    setup.gate.clear()
    layer.incoming.begin([4, 5], keep=())
    begun(setup, 2)
    threading.Timer(0.05, setup.gate.set).start()
    layer.run_rows(mx.zeros((1, HIDDEN)), np.array([[0, 1]], np.uint32))
    assert {0, 1, 2, 3} == set(layer.table.slots)


def test_a_failed_prefetch_is_read_again_on_demand(setup: Setup) -> None:
    layer = setup.layers[0]
    assert layer.incoming is not None
    setup.bad = {5}
    layer.incoming.begin([5], keep=())
    begun(setup, 1)
    setup.pool.run_all([lambda: None, lambda: None])
    with pytest.raises(StoreError, match="unreadable"):
        layer.run_rows(mx.zeros((1, HIDDEN)), np.array([[5, 1]], np.uint32))
    setup.bad.clear()
    layer.run_rows(mx.zeros((1, HIDDEN)), np.array([[5, 1]], np.uint32))
    assert not layer.table.reserved


def drive(setup: Setup, prefetcher: Prefetcher, ids: np.ndarray) -> list[np.ndarray]:
    """Run a trace through the layers as dispatch does."""
    outputs = []
    x = mx.array(np.random.default_rng(1).standard_normal((1, HIDDEN), dtype=np.float32))
    for token in ids:
        for layer, experts in zip(setup.layers, token, strict=True):
            index = layer.buffers.layer.index
            mx.eval(x, *prefetcher.lookout(index, x))
            y = layer.run_rows(x, experts[None].astype(np.uint32))
            prefetcher.routed(index, experts[None])
            outputs.append(np.array(y))
            layer.settle()
    return outputs


def trace(tokens: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.stack([[random.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(tokens)])


def test_forced_prefetch_changes_no_output(checkpoint: Checkpoint) -> None:
    ids = trace(60)
    results = []
    for predictors in ([], [Oracle(ids)]):
        setup = Setup(checkpoint, capacity=4)
        prefetcher = Prefetcher(setup.layers, predictors, 3, forced=2)
        results.append(drive(setup, prefetcher, ids))
        counts = [layer.table.counts for layer in setup.layers]
        assert bool(predictors) == any(c.prefetched for c in counts)
        for layer in setup.layers:
            assert layer.incoming is not None
            layer.incoming.clear()
            assert not layer.table.reserved
        setup.close()
    for plain, ahead in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, ahead)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def measured(prefetcher: Prefetcher, fetch_s: float) -> None:
    """As if serving had measured that, and measured no demand from now on."""
    for _ in range(10_000):
        prefetcher.measures.fetch_idle.add(fetch_s)
        prefetcher.measures.saved.add(fetch_s)
        prefetcher.measures.layer_idle.add(2e-3)
        prefetcher.measures.submit.add(50e-6)
    prefetcher.measures.add_demand = lambda *_args, **_kw: None  # type: ignore[method-assign]


@pytest.mark.parametrize(("fetch_s", "speaks"), [(1e-3, True), (1e-9, False)])
def test_it_speaks_where_prefetch_pays_and_is_silent_where_not(
    checkpoint: Checkpoint, fetch_s: float, speaks: bool
) -> None:
    ids = trace(60)
    setup = Setup(checkpoint, capacity=4)
    prefetcher = Prefetcher(setup.layers, [Oracle(ids)], 3, clock=Clock())
    measured(prefetcher, fetch_s)
    drive(setup, prefetcher, ids[:32])
    assert not any(layer.table.counts.prefetched for layer in setup.layers), "it reads before it knows"
    score = prefetcher.scores[1][0]
    assert score.recall(TOP_K) == score.precision(TOP_K) == 1.0
    assert any(choice is not None for choice in prefetcher.choices) == speaks
    prefetcher.worth.phase = "trying" if speaks else prefetcher.worth.phase
    drive(setup, prefetcher, ids[32:])
    prefetched = sum(layer.table.counts.prefetched for layer in setup.layers)
    assert (prefetched > 0) == speaks
    setup.close()


def test_it_asks_nobody_while_it_sleeps_and_wakes_up(checkpoint: Checkpoint) -> None:
    ids = trace(60)
    setup = Setup(checkpoint, capacity=4)
    oracle = Oracle(ids)
    prefetcher = Prefetcher(setup.layers, [oracle], 3, clock=Clock())
    prefetcher.worth.phase = "asleep"
    seen: list[int] = []
    oracle.observe = lambda layer, _routing: seen.append(layer)  # type: ignore[method-assign]
    drive(setup, prefetcher, ids[:30])
    assert not seen
    assert prefetcher.steps == 30
    prefetcher.worth.phase = "learning"
    drive(setup, prefetcher, ids[:1])
    assert seen == [0, 1, 2]
    setup.close()


def test_a_prompts_rows_are_not_looked_at(checkpoint: Checkpoint) -> None:
    setup = Setup(checkpoint, capacity=EXPERTS)
    prefetcher = make_prefetcher("auto", setup.layers, EXPERTS, 3, {0: lambda x: x})
    assert prefetcher is not None
    assert prefetcher.lookout(0, mx.zeros((9, HIDDEN))) == []
    prefetcher.routed(0, np.zeros((9, TOP_K), np.uint32))
    assert prefetcher.steps == 0
    setup.close()


def test_names(checkpoint: Checkpoint) -> None:
    setup = Setup(checkpoint, capacity=EXPERTS)
    assert make_prefetcher("off", setup.layers, EXPERTS, 3, {}) is None
    with pytest.raises(ConfigError, match="'guess'"):
        make_prefetcher("guess", setup.layers, EXPERTS, 3, {})
    for layer in setup.layers:
        layer.pin_all(EXPERTS)
    assert make_prefetcher("auto", setup.layers, EXPERTS, 3, {}) is None
    setup.close()
