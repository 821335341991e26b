"""Threads kept on one core, and let go again.

Run: .venv/bin/pytest tests/common/test_cores.py
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import mlx.core as mx
import pytest

from titan.common.cores import OneCore
from titan.common.platform import EVERY_CORE, every_core, place_thread

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(EVERY_CORE) < 2 or mx.default_device().type != mx.DeviceType.cpu,
    reason="needs Linux, two cores and MLX on the CPU",
)


def in_thread(work: Callable[[], object]) -> object:
    """What `work` returns on a thread of its own, which is not kept anywhere afterwards."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(30)
    return found[0]


def allowed() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(threading.get_native_id()))


def test_this_thread_and_its_stream_share_a_core_until_released() -> None:
    def work() -> tuple[int, frozenset[int], set[frozenset[int]], frozenset[int]]:
        kept = OneCore()
        here = allowed()
        everyone = [frozenset(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")]
        there = {cores for cores in everyone if len(cores) == 1}
        count = everyone.count(here)
        kept.release()
        kept.release()
        return kept.kept or count, here, there, allowed()

    count, here, there, after = in_thread(work)  # type: ignore[misc]
    assert count >= 2
    assert len(here) == 1
    assert here in there
    assert after == EVERY_CORE


def test_what_a_kept_thread_begins_is_free() -> None:
    def work() -> tuple[frozenset[int], object, object]:
        place_thread(threading.get_native_id(), {min(EVERY_CORE)})
        with every_core():
            free = in_thread(allowed)
        return allowed(), free, in_thread(allowed)

    mine, free, inherited = in_thread(work)  # type: ignore[misc]
    assert mine == inherited == {min(EVERY_CORE)}
    assert free == EVERY_CORE


def test_a_thread_that_is_not_there_is_no_error() -> None:
    assert not place_thread(2**22 - 1, EVERY_CORE)
