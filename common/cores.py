"""Cores of this machine, on Linux: MLX's thread and the thread that runs its CPU stream kept on one of them.

MLX hands every small operation of a CPU stream to a thread of its own. When the two sit on different cores and the
other core has gone to sleep, each hand-over pays for waking it, and decode falls into a state that lasts for seconds
and takes two to three times as long. On one core the hand-over is a switch. With a GPU, and on systems that let no
thread choose its core (macOS), nothing is done.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

import mlx.core as mx
import psutil

from titan.common.log import get_logger
from titan.common.platform import EVERY_CORE, place_thread

log = get_logger("cores")

TASKS = Path("/proc/self/task")
LOOK_S = 0.03
PROBE = 256  # rows of the products by which the stream's thread is recognised
PROBES = 4


class OneCore:
    """Keeps the calling thread and its MLX stream's thread on the least busy core until `release`."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._kept: list[int] = []
        if sys.platform != "linux" or mx.default_device().type != mx.DeviceType.cpu or len(EVERY_CORE) < 2:
            return
        stream = _stream_thread()
        if stream is None:
            log.info("the thread of MLX's CPU stream was not recognised: threads stay where the system puts them")
            return
        busy = psutil.cpu_percent(LOOK_S, percpu=True)
        core = min(EVERY_CORE, key=lambda c: busy[c] if c < len(busy) else 0.0)
        self._kept = [thread for thread in (self._thread, stream) if place_thread(thread, {core})]

    @property
    def kept(self) -> int:
        """How many threads are kept: two, or none."""
        return len(self._kept)

    def release(self) -> None:
        """Let the threads run anywhere again. From any thread, more than once."""
        for thread in self._kept:
            place_thread(thread, EVERY_CORE)
        self._kept = []


def _stream_thread() -> int | None:
    """The thread that computes what this one evaluates: the one that ran most, and for most of the time."""
    x = mx.ones((PROBE, PROBE))
    mx.eval(x)
    before = _ran_ns()
    for _ in range(PROBES):
        mx.eval(x @ x)
    ran = {thread: ns - before.get(thread, ns) for thread, ns in _ran_ns().items()}
    mine = ran.pop(threading.get_native_id(), 0)
    most = max(ran, key=lambda thread: ran[thread], default=None)
    return most if most is not None and ran[most] > max(mine, sum(ran.values()) / 2) else None


def _ran_ns() -> dict[int, int]:
    """Nanoseconds on a core, by thread of this process."""
    found = {}
    for task in TASKS.iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that ended meanwhile
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return found
