"""The queue of requests: bounded, fair between sessions, and merged only where the result is the same.

Run: .venv/bin/pytest tests/worker/test_requests.py
"""

from __future__ import annotations

import numpy as np
import pytest

from titan.common.errors import WorkerOverloaded
from titan.common.wire.messages import ExecuteCall
from titan.worker.requests import MAX_BATCH_PAIRS, MAX_QUEUED, MAX_QUEUED_PER_ORIGIN, RequestQueue, arrival, expired


class Asked:
    """A request that remembers nothing but what it is."""

    def __init__(
        self, origin: str, number: int, *, layer: int = 0, sort: bool = False, pairs: int = 2, deadline_s: float = 1.0
    ) -> None:
        ids = np.zeros(pairs, np.uint32)
        self.call = ExecuteCall(number, layer, np.zeros((1, 4), np.float32), ids, ids, sort, deadline_s)
        self.origin = origin
        self.arrived = arrival()

    def respond(self, outcome: object, queue_us: int) -> None: ...


def ids(batch: list) -> list[int]:
    return [request.call.request_id for request in batch]


def drain(queue: RequestQueue, *, merge: bool) -> list[list[int]]:
    taken = []
    while batch := queue.take(merge=merge):
        taken.append(ids(batch))
    return taken


def test_first_come_first_served_within_a_session() -> None:
    queue = RequestQueue()
    for number in range(5):
        queue.put(Asked("a", number))
    assert drain(queue, merge=False) == [[0], [1], [2], [3], [4]]
    assert len(queue) == 0


def test_sessions_take_turns() -> None:
    queue = RequestQueue()
    for number in range(4):
        queue.put(Asked("greedy", number))
    queue.put(Asked("modest", 10))
    queue.put(Asked("late", 20))
    assert drain(queue, merge=False) == [[0], [10], [20], [1], [2], [3]]


def test_requests_of_one_layer_are_taken_together() -> None:
    queue = RequestQueue()
    queue.put(Asked("a", 1, layer=5))
    queue.put(Asked("a", 2, layer=6))
    queue.put(Asked("b", 3, layer=5))
    queue.put(Asked("c", 4, layer=7))
    queue.put(Asked("c", 5, layer=5))  # behind another of its session: not out of order
    assert drain(queue, merge=True) == [[1, 3], [4], [2], [5]]
    assert queue.merged == 2


def test_sorted_and_unsorted_requests_are_not_mixed() -> None:
    queue = RequestQueue()
    queue.put(Asked("a", 1, sort=True))
    queue.put(Asked("b", 2, sort=False))
    queue.put(Asked("c", 3, sort=True))
    assert drain(queue, merge=True) == [[1, 3], [2]]


def test_a_batch_has_a_limit() -> None:
    queue = RequestQueue()
    half = MAX_BATCH_PAIRS // 2
    for number, origin in enumerate("abc"):
        queue.put(Asked(origin, number, pairs=half))
    assert drain(queue, merge=True) == [[0, 1], [2]]


def test_one_session_cannot_fill_the_queue() -> None:
    queue = RequestQueue()
    for number in range(MAX_QUEUED_PER_ORIGIN):
        queue.put(Asked("greedy", number))
    with pytest.raises(WorkerOverloaded):
        queue.put(Asked("greedy", 99))
    queue.put(Asked("modest", 100))
    assert queue.waiting("greedy") == MAX_QUEUED_PER_ORIGIN
    assert queue.waiting("modest") == 1
    assert queue.waiting("nobody") == 0


def test_all_sessions_together_cannot_either() -> None:
    queue = RequestQueue()
    for number in range(MAX_QUEUED):
        queue.put(Asked(f"session-{number % 8}", number))
    with pytest.raises(WorkerOverloaded):
        queue.put(Asked("another", 99))
    assert len(queue.drain()) == MAX_QUEUED
    queue.put(Asked("another", 99))


def test_the_bytes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.worker.requests.MAX_QUEUED_BYTES", 160)  # a request and its outputs: 64
    queue = RequestQueue()
    queue.put(Asked("a", 1))
    queue.put(Asked("b", 2))
    with pytest.raises(WorkerOverloaded):
        queue.put(Asked("c", 3))
    queue.take(merge=False)
    queue.put(Asked("c", 3))


def test_a_deadline_of_zero_never_passes() -> None:
    patient, hurried = Asked("a", 1, deadline_s=0.0), Asked("a", 2, deadline_s=0.5)
    assert not expired(patient, patient.arrived + 1e6)
    assert not expired(hurried, hurried.arrived + 0.4)
    assert expired(hurried, hurried.arrived + 0.6)
