"""Hundreds of requests, many at a time, cancelled and malformed at random: nothing is left behind.

Run: `.venv/bin/pytest tests/coordinator/api/test_soak.py`. docs/server.md has the figures of a long run, and
tests/cluster/test_load.py does the same to a cluster that loses a worker.
"""

from __future__ import annotations

import gc
import threading

import mlx.core as mx
import psutil
from fixtures.api_server import RunningApi
from fixtures.generation import PROMPTS, ProbedEngine, wait_until
from fixtures.load import Load

REQUESTS = 150


def test_nothing_is_left_behind() -> None:
    with ProbedEngine(queue_limit=64, prefill_step_tokens=32) as probed, RunningApi(probed) as api:
        load = Load(api.url, "demo", PROMPTS)
        load.expected = load.learn()
        wait_until(api.idle, "the engine to be idle")
        gc.collect()
        before_bytes = probed.engine.run_between_steps(mx.get_active_memory).result(10)
        process = psutil.Process()
        before = (process.num_fds(), threading.active_count())
        assert load.run(range(REQUESTS)).keys() == {"whole", "streamed", "left", "refused"}
        wait_until(api.idle, "the engine to be idle")
        status = probed.engine.status()
        assert (status.state, status.restarts, status.kv_tokens, status.failed) == ("ready", 0, 0, 0)
        assert status.completed + status.cancelled >= REQUESTS // 2
        gc.collect()
        assert probed.engine.run_between_steps(mx.get_active_memory).result(10) == before_bytes
        wait_until(lambda: process.num_fds() <= before[0] + 2, "connections to close")
        wait_until(lambda: threading.active_count() <= before[1] + 8, "threads to end")  # asyncio keeps a small pool
        assert load.learn() == load.expected
