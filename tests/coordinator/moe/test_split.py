"""A call that fails is tried once more where a replica is, else executed here: every pair once, the same result.

All of it with both wire precisions.

Run: .venv/bin/pytest tests/coordinator/moe/test_split.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.fake_workers import Experts, FakeTransport, FakeWorker
from fixtures.sums import exact_sums, sum_bound

from titan.common.errors import ChecksumMismatch, WorkerOverloaded
from titan.common.experts import ExpertLayer
from titan.common.slots.buffers import LayerBuffers
from titan.coordinator.moe.dispatch import Dispatcher
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.placement.cost import Costs

HIDDEN, EXPERTS, TOP_K = 128, 8, 4
FAILING = ["overloaded", "refused", "bad reply", "broken"]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    path = tmp_path_factory.mktemp("model") / "mini"
    make_checkpoint(path, layers=1, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, width=64)
    made = Experts.of(path)
    yield made
    made.store.close()


class Duo:
    """Two workers of which each holds every expert, and a dispatcher with `slots` slots at home."""

    def __init__(
        self, experts: Experts, stack: ExitStack, precision: str, execute_s: float = 10.0, verify: float = 0.0
    ) -> None:
        self.workers: list[FakeWorker] = []
        for name in ("one", "two"):
            transport = FakeTransport(name, experts.everywhere())
            stack.callback(transport.close)
            self.workers.append(FakeWorker(name, transport, range(EXPERTS), 0, ReplyTimes(execute_s, 1e-6)))
        self.one, self.two = (worker.transport for worker in self.workers)
        self.home: ExpertLayer = experts.layer(TOP_K)
        self.dispatcher = Dispatcher(
            {0: self.home}, self.workers, HIDDEN, "float32", verify=verify, reduced=precision == "reduced"
        )
        self.reference = experts.everywhere()

    def divide(self) -> None:
        """Each worker holds one half of the experts."""
        for number, worker in enumerate(self.workers):
            assert worker.ready is not None
            worker.ready = replace(worker.ready, held={0: frozenset(range(4 * number, 4 * number + 4))})

    def check(self, rows: int, seed: int = 0) -> None:
        """One layer: the outputs are those of one machine with all experts, and every pair was executed once."""
        rng = np.random.default_rng(seed)
        x = mx.array(rng.standard_normal((rows, HIDDEN)).astype(np.float32))
        chosen = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)], np.uint32)
        expected = self.reference.run_rows(x, chosen)
        if self.dispatcher.reduced:
            scores = mx.softmax(mx.array(rng.standard_normal((rows, TOP_K)).astype(np.float32)), axis=-1)
            found = self.dispatcher.execute(0, x, mx.array(chosen), scores)
            off = np.abs(np.array(found) - exact_sums(expected, scores))
            assert (off <= sum_bound(expected, scores, parts=3)).all()
        else:
            found = self.dispatcher.execute(0, x, mx.array(chosen))
            np.testing.assert_array_equal(np.array(found), np.array(expected))
        done = self.dispatcher.executed
        assert done.local + done.ssd + done.hedged + sum(done.remote.values()) == rows * TOP_K


@pytest.fixture(params=["exact", "reduced"])
def precision(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("mode", FAILING)
def test_what_one_worker_does_not_execute_another_does(
    experts: Experts, stack: ExitStack, precision: str, mode: str, rows: int
) -> None:
    duo = Duo(experts, stack, precision)
    duo.one.mode = mode
    duo.check(rows)
    done = duo.dispatcher.executed
    assert done.remote == {"two": rows * TOP_K}
    assert done.retried == rows * TOP_K
    assert done.fallbacks == 0
    assert (duo.workers[0].ready is not None) == (mode == "overloaded"), "an overloaded worker has not failed"
    assert duo.workers[1].ready is not None


@pytest.mark.parametrize("mode", FAILING)
def test_what_nobody_executes_is_executed_here_after_one_retry(
    experts: Experts, stack: ExitStack, precision: str, mode: str
) -> None:
    duo = Duo(experts, stack, precision)
    duo.one.mode = duo.two.mode = mode
    duo.check(2)
    done = duo.dispatcher.executed
    assert done.remote == {}
    assert done.fallbacks == 2 * TOP_K
    assert len(duo.one.calls) == len(duo.two.calls) == 1


def test_an_answer_that_does_not_stand_a_check_is_replaced_here_where_its_experts_are_now(
    experts: Experts, stack: ExitStack, precision: str
) -> None:
    duo = Duo(experts, stack, precision, verify=1.0)
    duo.one.mode = "wrong"
    duo.check(1)
    done = duo.dispatcher.executed
    assert (done.verified, done.fallbacks, done.remote) == (1, TOP_K, {})
    assert "computed something else" in str(duo.workers[0].error)


def test_two_halves_that_both_fail_come_in_the_routers_order(
    experts: Experts, stack: ExitStack, precision: str
) -> None:
    duo = Duo(experts, stack, precision)
    duo.divide()
    duo.one.mode = duo.two.mode = "broken"
    duo.check(5)
    assert duo.dispatcher.executed.fallbacks == 5 * TOP_K


def test_without_a_replica_it_is_executed_here_and_others_answers_count(
    experts: Experts, stack: ExitStack, precision: str
) -> None:
    duo = Duo(experts, stack, precision)
    duo.divide()
    duo.one.mode = "broken"
    duo.check(12)
    done = duo.dispatcher.executed
    assert done.retried == 0
    assert done.fallbacks > 0
    assert done.remote["two"] + done.fallbacks == 12 * TOP_K


def test_a_late_worker_is_replaced_within_the_time_that_was_allowed_anyway(
    experts: Experts, stack: ExitStack, precision: str
) -> None:
    duo = Duo(experts, stack, precision, execute_s=0.4)
    for _ in range(32):
        duo.workers[0].ready.times.record(TOP_K, 1e-4)  # type: ignore[union-attr]  # its deadline is the floor now
    duo.one.mode = "silent"
    duo.check(1)
    done = duo.dispatcher.executed
    assert done.retried == TOP_K
    assert done.remote == {"two": TOP_K}
    assert duo.two.calls[0].deadline_s < 0.4


def test_no_retry_when_the_time_is_over(experts: Experts, stack: ExitStack, precision: str) -> None:
    duo = Duo(experts, stack, precision, execute_s=0.05)
    duo.one.mode = "silent"  # nothing is known of it: its deadline is all the time there is
    started = time.monotonic()
    duo.check(1)
    assert time.monotonic() - started >= 0.05
    done = duo.dispatcher.executed
    assert (done.retried, done.fallbacks) == (0, TOP_K)


def test_the_cheaper_of_retry_and_local_ssd_is_taken(experts: Experts, stack: ExitStack, precision: str) -> None:
    duo = Duo(experts, stack, precision)
    duo.one.mode = "broken"
    duo.dispatcher.costs = Costs((1e-6,) * 3, (0.0, 1e-6, 9.0), (0.0,) * 3, ssd_s=1e-3, readers=1)
    duo.check(1)
    assert duo.dispatcher.executed.fallbacks == TOP_K
    assert not duo.two.calls


def test_a_worker_that_was_overloaded_is_asked_again_in_the_next_layer(
    experts: Experts, stack: ExitStack, precision: str
) -> None:
    duo = Duo(experts, stack, precision)
    duo.one.mode = "overloaded"
    duo.check(1)
    assert not isinstance(duo.workers[0].error, WorkerOverloaded)
    duo.one.mode = "right"
    x, chosen = mx.zeros((1, HIDDEN)), mx.array([[0, 1, 2, 3]], mx.uint32)
    scores = mx.ones((1, TOP_K)) if precision == "reduced" else None
    mx.eval(duo.dispatcher.execute(0, x, chosen, scores))
    assert len(duo.one.calls) == 2


def unreadable(layer: int, expert: int, _targets: Sequence[np.ndarray]) -> None:
    raise ChecksumMismatch(f"expert {expert} of layer {layer} is not what was packed", "pack it again")


def beside_a_broken_disk(duo: Duo, one_s: float) -> None:
    """Nothing can be read here, and each worker holds a half; `one` takes `one_s` a pair, `two` an hour."""
    duo.divide()
    duo.dispatcher.costs = Costs((1e-6, one_s, 3600.0), (0.0, one_s, 3600.0), (0.0,) * 3, ssd_s=1.0, readers=1)
    duo.home = ExpertLayer(LayerBuffers(duo.home.buffers.layer, TOP_K, "float32"), unreadable)
    duo.dispatcher = Dispatcher(
        {0: duo.home}, duo.workers, HIDDEN, "float32", None, duo.dispatcher.costs, reduced=duo.dispatcher.reduced
    )


@pytest.mark.parametrize(("one_s", "rescued_by"), [(3600.0, {"one", "two"}), (1e-6, {"two"})])
@pytest.mark.parametrize("rows", [1, 5])
def test_what_cannot_be_read_here_a_worker_that_has_it_executes(
    experts: Experts, stack: ExitStack, precision: str, rows: int, one_s: float, rescued_by: set[str]
) -> None:
    duo = Duo(experts, stack, precision)
    beside_a_broken_disk(duo, one_s)
    duo.check(rows)
    done = duo.dispatcher.executed
    assert done.rescued == sum(done.remote[name] for name in rescued_by) > 0
    assert sum(done.remote.values()) == rows * TOP_K


def test_what_cannot_be_read_here_and_nobody_has_is_an_error(
    experts: Experts, stack: ExitStack, precision: str
) -> None:
    duo = Duo(experts, stack, precision)
    beside_a_broken_disk(duo, 1e-6)
    two, duo.workers[1].ready = duo.workers[1].ready, None
    with pytest.raises(ChecksumMismatch):
        duo.check(3)
    duo.workers[1].ready = two
    duo.check(3)
