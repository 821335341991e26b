"""A worker that is started again has its experts on its disk.

Run: .venv/bin/pytest tests/cluster/test_worker_cache.py
"""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from fixtures.certificates import Cluster, make_cluster
from fixtures.lanes import DEADLINE_S

from titan.common.arrays import compute_dtype
from titan.common.config.hosts import Timeouts, Worker
from titan.common.registry import open_checkpoint
from titan.common.security import Role
from titan.common.store import ExpertStore
from titan.common.wire.messages import ExecuteCall
from titan.coordinator.demo.processes import WorkerProcess
from titan.coordinator.remote.exchange import Exchange
from titan.coordinator.remote.greet import greet
from titan.coordinator.remote.grpc_transport import GrpcTransport
from titan.coordinator.remote.install import install
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.share import Share
from titan.deploy import DEMO_MODEL

RESIDENCY = {0: (0, 1, 2, 3), 3: (5, 6)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    made = make_cluster(tmp_path_factory.mktemp("kept") / "certs")
    made.member("mini")
    made.member("coordinator", Role.COORDINATOR, [])
    return made


def served(cluster: Cluster, folder: Path, *arguments: str) -> tuple[dict[str, float], np.ndarray]:
    """Start a worker, have it hold RESIDENCY, ask it something, end it: bytes installed by source, and the outputs."""
    checkpoint = open_checkpoint(DEMO_MODEL)
    store, shape = ExpertStore(checkpoint), checkpoint.shape
    dtype = compute_dtype(
        {c.dtype for s in shape.layers for m in s.matrices for c in m.components if c.dtype[0] != "U"}
    )
    given = ("--metrics", "127.0.0.1:0", "--cache", str(folder), *arguments)
    with WorkerProcess("mini", cluster.folder, 64 << 20, arguments=given) as worker:
        address = worker.wait_until_listening()
        url = next(str(line["metrics"]) for line in worker.log if line.get("message") == "listening")
        coordinator = cluster.member("coordinator", Role.COORDINATOR, [])
        spec = Worker(name="mini", addresses=(address,))
        connection = greet(spec, coordinator, Timeouts(), shape, dtype, "instance-1")
        install(connection, Share(RESIDENCY), store.read_bytes, DEADLINE_S, lambda _: None, lambda: False)
        transport, exchange = GrpcTransport(connection.stub, connection.hello.session, "mini", dtype), Exchange()
        ids = np.arange(4, dtype=np.uint32)
        x = np.random.default_rng(0).standard_normal((1, shape.hidden_size)).astype(np.float32)
        outputs: list[np.ndarray] = []
        call = ExecuteCall(1, 0, x, ids * 0, ids, False, DEADLINE_S)
        exchange.send(transport, call, ids, ReplyTimes(DEADLINE_S, 0.0))
        assert not exchange.collect(lambda _sent, result: outputs.append(result.outputs.copy()))
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as reply:
            text = reply.read().decode()
        transport.close()
        connection.close()
        assert worker.stop() == 0
    store.close()
    found = re.findall(r'^titan_worker_installed_bytes_total\{source="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {source: float(value) for source, value in found}, outputs[0]


def test_nothing_is_sent_again_after_a_restart(cluster: Cluster, tmp_path: Path) -> None:
    size = open_checkpoint(DEMO_MODEL).shape.layers[0].expert_bytes
    first, expected = served(cluster, tmp_path / "cache")
    assert first == {"pushed": 6 * size}
    second, outputs = served(cluster, tmp_path / "cache")
    assert second == {"cache": 6 * size}
    np.testing.assert_array_equal(outputs, expected)
    damaged = sorted((tmp_path / "cache").glob("*/00000-00002-*.safetensors"))[0]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    third, outputs = served(cluster, tmp_path / "cache")
    assert third == {"cache": 5 * size, "pushed": size}
    np.testing.assert_array_equal(outputs, expected)
    assert served(cluster, tmp_path / "cache")[0] == {"cache": 6 * size}


def test_a_cache_that_is_too_small_keeps_what_fits(cluster: Cluster, tmp_path: Path) -> None:
    size = open_checkpoint(DEMO_MODEL).shape.layers[0].expert_bytes
    limit = ("--cache-size", f"{2 * size + 20_000}B")
    assert served(cluster, tmp_path / "cache", *limit)[0] == {"pushed": 6 * size}
    assert served(cluster, tmp_path / "cache", *limit)[0] == {"cache": 2 * size, "pushed": 4 * size}
