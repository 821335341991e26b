"""A worker's disk, measured through a worker that reads.

Run: .venv/bin/pytest tests/coordinator/calibration/test_reads.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.worker_server import DEADLINE_S, RunningWorker, running_worker

from titan.common.errors import ClusterError
from titan.coordinator.calibration.reads import cache_to_measure, figures_of_reads, measure_reads
from titan.coordinator.moe.workers import ReadyWorker
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.share import Share
from titan.coordinator.remote.transport import Transport


@dataclass
class Measuring:
    """The worker of a session that is ready."""

    name: str
    ready: ReadyWorker | None

    def set_aside(self, transport: Transport, error: ClusterError) -> None:
        raise AssertionError(error)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RunningWorker]:
    make_checkpoint(tmp_path / "model", layers=2, experts=8, hidden=128, width=64)
    with running_worker(tmp_path / "certs", tmp_path / "model") as running:
        yield running


def test_a_worker_that_reads_says_what_a_read_takes(worker: RunningWorker) -> None:
    cache = cache_to_measure(range(2, worker.shape.num_experts), 2)
    assert cache is not None
    connection = worker.connect("instance-1", share=Share({0: (0, 1)}, {1: cache}))
    transport = worker.transport(connection, "lane")
    try:
        session = ReadyWorker(
            transport, {0: frozenset((0, 1))}, ReplyTimes(DEADLINE_S, 0.0), {1: frozenset(cache.experts)}
        )
        found = measure_reads(Measuring("mini", session), 1, cache, worker.shape, worker.dtype)
        assert found is not None
        assert found.one.median_s > 0
        assert 1 <= found.readers <= 2
        holdings = worker.service.holdings
        assert holdings is not None
        assert holdings.total.loads - holdings.total.installed == found.one.samples + 2, "each was to be read once"
        resident = ReadyWorker(transport, {0: frozenset((0, 1))}, ReplyTimes(DEADLINE_S, 0.0))
        assert measure_reads(Measuring("mini", resident), 1, cache, worker.shape, worker.dtype) is None
    finally:
        transport.close()
        connection.close()
    assert measure_reads(Measuring("mini", None), 1, cache, worker.shape, worker.dtype) is None
    transport_closed = Measuring("mini", session)
    assert measure_reads(transport_closed, 1, cache, worker.shape, worker.dtype) is None


def test_experts_are_distinct_and_no_more_than_are_needed() -> None:
    many = cache_to_measure(range(8, 256), 8)
    assert many is not None
    assert len(set(many.experts)) == len(many.experts) == 40
    assert list(many.experts) != sorted(many.experts)
    few = cache_to_measure([5, 6], 4)
    assert few is not None
    assert sorted(few.experts) == [5, 6]
    assert cache_to_measure([], 4) is None
    assert cache_to_measure([1, 2], 0) is None


@pytest.mark.parametrize(
    ("together_s", "readers"), [(1e-3, 4), (1.3e-3, 3), (2e-3, 2), (4e-3, 1), (9e-3, 1), (1e-5, 4)]
)
def test_readers_that_help_are_told_from_reads_together(together_s: float, readers: int) -> None:
    found = figures_of_reads([1e-3, 1e-3, 50e-3], [together_s], 4)
    assert found is not None
    assert (found.one.median_s, found.readers) == (pytest.approx(1e-3), readers)
    alone = figures_of_reads([1e-3], [], 1)
    assert alone is not None
    assert alone.readers == 1


@pytest.mark.parametrize(("singles", "groups"), [([], []), ([None, 1e-3], []), ([1e-3], [None]), ([0.0, 0.0], [1e-3])])
def test_reads_that_failed_or_never_happened_are_no_figure(
    singles: Sequence[float | None], groups: Sequence[float | None]
) -> None:
    assert figures_of_reads(singles, groups, 4) is None
