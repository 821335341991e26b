"""Both transports do the same, with both wire precisions: the same results, the same errors, the same limits.

Run: .venv/bin/pytest tests/coordinator/remote/test_conformance.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fixtures.worker_server import DEADLINE_S, RunningWorker, wait_until

from titan.common.errors import (
    ClusterError,
    SessionUnknown,
    WorkerBadReply,
    WorkerDraining,
    WorkerLost,
    WorkerOverloaded,
    WorkerRefused,
    WorkerTimeout,
)
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.coordinator.remote.connection import Connection
from titan.coordinator.remote.exchange import Exchange, Failed, Outstanding
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.transport import Transport
from titan.worker.requests import MAX_QUEUED, arrival

HIDDEN, EXPERTS = 128, 8
TIMES = ReplyTimes(DEADLINE_S, 0.0)


@pytest.fixture(params=["lane", "grpc"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def connection(worker: RunningWorker) -> Iterator[Connection]:
    opened = worker.connect("instance-1")
    yield opened
    opened.close()


@pytest.fixture
def transport(worker: RunningWorker, connection: Connection, kind: str) -> Iterator[Transport]:
    opened = worker.transport(connection, kind)
    yield opened
    opened.close()


class Calls:
    """Makes calls of one wire precision."""

    def __init__(self, precision: str) -> None:
        self.reduced = precision == "reduced"

    def __call__(
        self, seed: int, *, rows: int = 3, pairs: int = 7, layer: int = 0, deadline_s: float = DEADLINE_S
    ) -> ExecuteCall:
        rng = np.random.default_rng(seed)
        scores = rng.random(pairs, np.float32) if self.reduced else None
        return exact_call(seed, rows, pairs, layer, deadline_s)._replace(scores=scores)

    def answer(
        self, call: ExecuteCall, more: int = 0, value: float = 1.0, request_id: int | None = None
    ) -> ExecuteResult:
        """An answer of the right form, but for `more` lines."""
        lines = (call.activations.shape[0] if self.reduced else call.pair_rows.size) + more
        number = call.request_id if request_id is None else request_id
        return ExecuteResult(number, np.full((lines, HIDDEN), value, np.float32), 0, 0, reduced=self.reduced)


@pytest.fixture(params=["exact", "reduced"])
def call_of(request: pytest.FixtureRequest) -> Calls:
    return Calls(request.param)


def exact_call(seed: int, rows: int, pairs: int, layer: int, deadline_s: float) -> ExecuteCall:
    rng = np.random.default_rng(seed)
    return ExecuteCall(
        request_id=seed,
        layer=layer,
        activations=rng.standard_normal((rows, HIDDEN), np.float32),
        pair_rows=rng.integers(0, rows, pairs).astype(np.uint32),
        pair_experts=rng.integers(0, EXPERTS, pairs).astype(np.uint32),
        sort=pairs >= 64,
        deadline_s=deadline_s,
    )


def collect(exchange: Exchange) -> tuple[dict[int, np.ndarray], list[Failed]]:
    results: dict[int, np.ndarray] = {}

    def take(outstanding: Outstanding, result: ExecuteResult) -> None:
        assert outstanding.call.request_id == result.request_id
        assert outstanding.call.request_id not in results, "answered twice"
        results[result.request_id] = result.outputs.copy()

    failed = exchange.collect(take)
    return results, failed


def ask(transport: Transport, *calls: ExecuteCall) -> tuple[dict[int, np.ndarray], list[Failed]]:
    exchange = Exchange()
    for call in calls:
        exchange.send(transport, call, np.arange(call.pair_rows.size), TIMES)
    return collect(exchange)


def error_of(transport: Transport, call: ExecuteCall) -> ClusterError:
    results, failed = ask(transport, call)
    assert not results
    assert len(failed) == 1
    return failed[0].error


def here(worker: RunningWorker, call: ExecuteCall) -> np.ndarray:
    """The same call on the worker's own thread, without any transport."""
    holdings = worker.service.execution._holdings()
    assert holdings is not None
    outcome = worker.mlx.run(lambda: holdings.execute([call]))[0]
    assert isinstance(outcome, ExecuteResult)
    return outcome.outputs.copy()


def test_results_are_those_of_the_worker_bit_for_bit(
    worker: RunningWorker, transport: Transport, call_of: Calls
) -> None:
    calls = [call_of(1), call_of(2, layer=1), call_of(3, rows=1, pairs=4), call_of(4, rows=70, pairs=280)]
    results, failed = ask(transport, *calls)
    assert not failed
    for call in calls:
        np.testing.assert_array_equal(results[call.request_id], here(worker, call))


def test_a_message_of_many_megabytes_passes(worker: RunningWorker, transport: Transport, call_of: Calls) -> None:
    call = call_of(1, rows=12_000, pairs=12_000)
    assert call.activations.nbytes > 5 << 20
    results, failed = ask(transport, call)
    assert not failed
    np.testing.assert_array_equal(results[1], here(worker, call))


def test_a_message_over_the_limit_ends_the_session_and_not_the_worker(
    worker: RunningWorker, transport: Transport, kind: str, call_of: Calls
) -> None:
    error = error_of(
        transport, call_of(1, rows=1 << 16, pairs=1 << 12)._replace(activations=np.zeros((1 << 17, 128), np.float32))
    )
    assert isinstance(error, WorkerLost), error
    fresh = worker.connect("instance-2")
    again = worker.transport(fresh, kind)
    assert not ask(again, call_of(2))[1]
    again.close()
    fresh.close()


def _pairs(call: ExecuteCall, rows: list[int], experts: list[int]) -> ExecuteCall:
    scores = None if call.scores is None else call.scores[: len(rows)]
    return call._replace(pair_rows=np.array(rows, np.uint32), pair_experts=np.array(experts, np.uint32), scores=scores)


def _row_beyond(call: ExecuteCall) -> ExecuteCall:
    return _pairs(call, [0, 1, 3], [0, 0, 0])


def _expert_beyond(call: ExecuteCall) -> ExecuteCall:
    return _pairs(call, [0, 0], [0, EXPERTS])


def _no_pairs(call: ExecuteCall) -> ExecuteCall:
    return _pairs(call, [], [])


def _narrow(call: ExecuteCall) -> ExecuteCall:
    return call._replace(activations=call.activations[:, :-1].copy())


def _no_layer(call: ExecuteCall) -> ExecuteCall:
    return call._replace(layer=77)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_row_beyond, "names row 3 of 3"),
        (_expert_beyond, f"names expert {EXPERTS} of {EXPERTS}"),
        (_no_pairs, "pairs"),
        (_narrow, "bytes of activations"),
        (_no_layer, "of layer 77 are not held here"),
    ],
)
def test_a_wrong_request_is_refused_and_the_next_is_served(
    transport: Transport, call_of: Calls, spoil: Callable[[ExecuteCall], ExecuteCall], words: str
) -> None:
    error = error_of(transport, spoil(call_of(1)))
    assert type(error) is WorkerRefused
    assert words in str(error)
    results, failed = ask(transport, call_of(2))
    assert not failed
    assert set(results) == {2}


@pytest.mark.parametrize("scores", [[0.5] * 6, [0.5] * 8, [0.5] * 6 + [float("nan")], [float("inf")] * 7])
def test_scores_that_are_none_are_refused(transport: Transport, kind: str, scores: list[float]) -> None:
    if kind == "lane" and len(scores) != 7:
        return  # there a wrong number of scores is a wrong number of activations
    call = exact_call(1, 3, 7, 0, DEADLINE_S)._replace(scores=np.array(scores, np.float32))
    error = error_of(transport, call)
    assert type(error) is WorkerRefused
    assert "scores" in str(error)


def test_a_session_that_did_not_agree_on_it_is_refused_scores(worker: RunningWorker, kind: str) -> None:
    connection = worker.connect("instance-1", reduced=False)
    transport = worker.transport(connection, kind)
    error = error_of(transport, Calls("reduced")(1))
    assert type(error) is WorkerRefused
    assert "did not agree" in str(error)
    assert not ask(transport, Calls("exact")(2))[1]
    transport.close()
    connection.close()


def test_both_precisions_in_one_wait(worker: RunningWorker, transport: Transport) -> None:
    calls = [Calls(precision)(seed) for seed, precision in enumerate(("exact", "reduced", "exact", "reduced"), 1)]
    blocked = Blocked(worker)  # so that they are executed together
    exchange = Exchange()
    for call in calls:
        exchange.send(transport, call, np.arange(call.pair_rows.size), TIMES)
    blocked.release()
    results, failed = collect(exchange)
    assert not failed
    for call in calls:
        np.testing.assert_array_equal(results[call.request_id], here(worker, call))


def test_a_replaced_session_is_unknown(worker: RunningWorker, transport: Transport, call_of: Calls) -> None:
    assert not ask(transport, call_of(1))[1]
    worker.connect("instance-1").close()  # the same coordinator says Hello again
    error = error_of(transport, call_of(2))
    assert isinstance(error, (SessionUnknown, WorkerLost)), error


@pytest.mark.parametrize("mode", ["nan", "inf", "short", "long", "other kind"])
def test_an_answer_that_is_none_is_named(
    worker: RunningWorker, transport: Transport, call_of: Calls, mode: str
) -> None:
    def lie(calls: object) -> list:
        assert isinstance(calls, list)
        answers = []
        for call in calls:
            answer = call_of.answer(call, {"short": -1, "long": 1}.get(mode, 0))
            answer.outputs[0, 3] = {"nan": np.nan, "inf": np.inf}.get(mode, 1)
            answers.append(answer._replace(reduced=call_of.reduced != (mode == "other kind")))
        return answers

    worker.mlx.serve(lie)
    assert isinstance(error_of(transport, call_of(1)), WorkerBadReply)


def test_huge_but_finite_values_are_an_answer(worker: RunningWorker, transport: Transport, call_of: Calls) -> None:
    worker.mlx.serve(lambda calls: [call_of.answer(call, value=3e38) for call in calls])
    results, failed = ask(transport, call_of(1))
    assert not failed
    assert float(results[1].max()) == pytest.approx(3e38)


def test_an_answer_to_another_request_is_dropped(worker: RunningWorker, transport: Transport, call_of: Calls) -> None:
    def swap(calls: object) -> list:
        assert isinstance(calls, list)
        return [call_of.answer(call, request_id=call.request_id + 1000) for call in calls]

    worker.mlx.serve(swap)
    exchange = Exchange()
    exchange.send(transport, call_of(1, deadline_s=0.3), np.arange(7), TIMES)
    results, failed = collect(exchange)
    assert not results
    assert isinstance(failed[0].error, WorkerTimeout)
    assert exchange.late == 1


class Blocked:
    """The worker's MLX thread, held up until `release`."""

    def __init__(self, worker: RunningWorker) -> None:
        self._release = threading.Event()
        started = threading.Event()

        def hold() -> None:
            started.set()
            assert self._release.wait(DEADLINE_S)

        self._job = worker.mlx.submit(hold)
        assert started.wait(DEADLINE_S)

    def release(self) -> None:
        self._release.set()
        self._job.result(DEADLINE_S)


def test_a_request_nobody_waits_for_any_more_is_not_executed(
    worker: RunningWorker, transport: Transport, call_of: Calls
) -> None:
    executed: list[int] = []

    def note(calls: object) -> list:
        assert isinstance(calls, list)
        executed.extend(call.request_id for call in calls)
        return [call_of.answer(call) for call in calls]

    worker.mlx.serve(note)
    blocked = Blocked(worker)
    exchange = Exchange()
    exchange.send(transport, call_of(1, deadline_s=0.1), np.arange(7), TIMES)
    _, failed = collect(exchange)
    assert isinstance(failed[0].error, WorkerTimeout)
    blocked.release()
    results, failed = ask(transport, call_of(2))
    assert not failed
    assert set(results) == {2}
    assert executed == [2]


class Waiting:
    """A request that fills the worker's queue."""

    def __init__(self, origin: str) -> None:
        self.call = exact_call(1, 3, 7, 0, DEADLINE_S)
        self.origin = origin
        self.arrived = arrival()

    def respond(self, outcome: object, queue_us: int) -> None:
        pass


def test_overload_is_answered_at_once_even_while_the_worker_executes(
    worker: RunningWorker, transport: Transport, call_of: Calls
) -> None:
    assert not ask(transport, call_of(1))[1]
    blocked = Blocked(worker)
    for number in range(MAX_QUEUED):
        worker.mlx.requests.put(Waiting(f"other-{number % 4}"))
    assert isinstance(error_of(transport, call_of(2)), WorkerOverloaded)
    blocked.release()
    wait_until(lambda: len(worker.mlx.requests) == 0, "emptying the queue")
    assert not ask(transport, call_of(3))[1]


def test_closing_wakes_whoever_waits(worker: RunningWorker, transport: Transport, call_of: Calls) -> None:
    blocked = Blocked(worker)
    exchange = Exchange()
    exchange.send(transport, call_of(1), np.arange(7), TIMES)
    threading.Timer(0.05, transport.close).start()
    _, failed = collect(exchange)
    assert isinstance(failed[0].error, WorkerLost)
    blocked.release()


def test_sending_on_a_closed_transport_fails_the_call(transport: Transport, call_of: Calls) -> None:
    transport.close()
    assert isinstance(error_of(transport, call_of(1)), WorkerLost)


def test_a_worker_that_ends_fails_its_calls(worker: RunningWorker, transport: Transport, call_of: Calls) -> None:
    assert not ask(transport, call_of(1))[1]
    worker.close()
    assert isinstance(error_of(transport, call_of(2)), (WorkerLost, WorkerDraining))


def test_two_workers_answer_in_one_wait(
    worker: RunningWorker, connection: Connection, transport: Transport, kind: str, call_of: Calls
) -> None:
    other = worker.transport(connection, "grpc" if kind == "lane" else "lane")
    exchange = Exchange()
    first, second = call_of(1), call_of(2, layer=1)
    exchange.send(transport, first, np.arange(7), TIMES)
    exchange.send(other, second, np.arange(7), TIMES)
    results, failed = collect(exchange)
    assert not failed
    assert set(results) == {1, 2}
    np.testing.assert_array_equal(results[2], here(worker, second))
    other.close()
