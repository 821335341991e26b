"""A worker process tells Prometheus what it does, and strangers cannot fill its log.

Run: .venv/bin/pytest tests/cluster/test_worker_metrics.py
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from fixtures.certificates import Cluster, make_cluster
from fixtures.lanes import DEADLINE_S, hello_request, open_lane_with
from fixtures.worker_server import wait_until
from prometheus_client.parser import text_string_to_metric_families

from titan.common.config.hosts import Timeouts, Worker
from titan.common.log_limit import BURST
from titan.common.registry import open_checkpoint
from titan.common.security import Role
from titan.common.security.channel import LIMITS, open_channel
from titan.common.security.revocation import Revocations
from titan.common.store import ExpertStore
from titan.common.wire.messages import ExecuteCall
from titan.coordinator.demo.processes import WorkerProcess
from titan.coordinator.remote.connection import CHANNEL_OPTIONS, Connection
from titan.coordinator.remote.exchange import Exchange
from titan.coordinator.remote.greet import greet
from titan.coordinator.remote.grpc_transport import GrpcTransport
from titan.coordinator.remote.install import install
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.share import Cache, Share
from titan.coordinator.remote.transport import Transport
from titan.deploy import DEMO_MODEL
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1.worker_pb2_grpc import WorkerStub

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/titan.json"
EXPERTS = (0, 1, 2, 3)
Figures = dict[str, float]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    made = make_cluster(tmp_path_factory.mktemp("watched") / "certs")
    made.member("mini")
    made.member("coordinator", Role.COORDINATOR, [])
    return made


@pytest.fixture
def worker(cluster: Cluster) -> Iterator[WorkerProcess]:
    with WorkerProcess("mini", cluster.folder, 64 << 20, arguments=("--metrics", "127.0.0.1:0")) as process:
        process.wait_until_listening()
        yield process


def entry(worker: WorkerProcess) -> dict:
    return next(line for line in worker.log if line.get("message") == "listening")


def scrape(worker: WorkerProcess) -> Figures:
    """Samples by name and labels, of the whole text; its form is checked on the way."""
    with urllib.request.urlopen(entry(worker)["metrics"], timeout=DEADLINE_S) as reply:
        text = reply.read().decode()
    found: Figures = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("titan_worker_")
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge")
        assert not re.search(r"_(ms|us|kb|mb|minutes)\b", family.name)  # base units
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def call_of(number: int, expert: int) -> ExecuteCall:
    hidden = open_checkpoint(DEMO_MODEL).shape.hidden_size
    ids = np.array([0, 0, 1], np.uint32)
    experts = np.array([0, 1, expert], np.uint32)
    return ExecuteCall(number, 0, np.ones((2, hidden), np.float32), ids, experts, False, DEADLINE_S)


def ask(transport: Transport, call: ExecuteCall) -> str:
    exchange = Exchange()
    exchange.send(transport, call, np.arange(call.pair_rows.size), ReplyTimes(DEADLINE_S, 0.0))
    failed = exchange.collect(lambda _sent, _result: None)
    return str(failed[0].error) if failed else ""


def test_what_a_worker_does_is_counted(cluster: Cluster, worker: WorkerProcess) -> None:
    before = scrape(worker)
    assert before["titan_worker_sessions"] == before["titan_worker_expert_bytes"] == 0
    assert before["titan_worker_expert_budget_bytes"] == 64 << 20
    coordinator = cluster.member("coordinator", Role.COORDINATOR, [])
    with open_channel("mini", worker.address, coordinator, timeout_s=DEADLINE_S, options=CHANNEL_OPTIONS) as channel:
        hello = WorkerStub(channel.channel).Hello(hello_request(), timeout=DEADLINE_S)
        revocations = Revocations(coordinator.ca_path, coordinator.ca_pem)
        spec = Worker(name="mini", addresses=(worker.address,))
        connection = Connection(spec, worker.address, channel, revocations, hello, coordinator)
        store = ExpertStore(open_checkpoint(DEMO_MODEL))
        install(connection, Share({0: EXPERTS}), store.read_bytes, DEADLINE_S, lambda _: None, lambda: False)
        store.close()
        lane = open_lane_with(worker.address, hello, coordinator)
        stream = GrpcTransport(connection.stub, hello.session, "mini", "float32")
        assert [ask(lane, call_of(n, 2)) for n in (1, 2, 3)] == ["", "", ""]
        assert ask(stream, call_of(4, 3)) == ""
        assert "not held here" in ask(lane, call_of(5, 7))
        operator = cluster.member("me", Role.OPERATOR, [])
        with (
            open_channel("mini", worker.address, operator, timeout_s=DEADLINE_S) as me,
            pytest.raises(grpc.RpcError),
        ):
            WorkerStub(me.channel).Hello(pb.HelloRequest(), timeout=DEADLINE_S)
        now = scrape(worker)
        lane.close()
        stream.close()
    expert_bytes = open_checkpoint(DEMO_MODEL).shape.layers[0].expert_bytes
    expected = {
        "titan_worker_sessions": 1,
        "titan_worker_opened_sessions_total": 1,
        "titan_worker_lanes": 1,
        "titan_worker_grpc_streams": 1,
        "titan_worker_requests_total{result=ok,transport=lane}": 3,
        "titan_worker_requests_total{result=ok,transport=grpc}": 1,
        "titan_worker_requests_total{result=worker_refused,transport=lane}": 1,
        "titan_worker_refusals_total{by=gate,reason=role_refused}": 1,
        "titan_worker_executed_rows_total": 8,
        "titan_worker_executed_pairs_total": 12,
        "titan_worker_experts": 4,
        "titan_worker_slots": 4,
        "titan_worker_queued_requests": 0,
        "titan_worker_installed_bytes_total{source=pushed}": 4 * expert_bytes,
        "titan_worker_connections_total{port=lane}": 1,
        "titan_worker_proved_connections_total{port=lane}": 1,
    }
    assert {name: now.get(name) for name in expected} == expected
    assert now["titan_worker_expert_bytes"] > 0
    assert now["titan_worker_process_bytes"] > now["titan_worker_expert_bytes"]
    for name in ("compute", "queue_wait"):
        assert now[f"titan_worker_{name}_seconds_total"] > 0
    assert now["titan_worker_proved_connections_total{port=grpc}"] == 2  # a coordinator's and an operator's
    assert now["titan_worker_connections_total{port=grpc}"] == 4  # each looked at the certificate first
    assert now["titan_worker_certificate_expiry_seconds"] > now["titan_worker_start_time_seconds"] > 1e9
    asked = set(re.findall(r"titan_worker_[a-z_]+", DASHBOARD.read_text()))
    exported = {name.partition("{")[0] for name in now}
    coordinators = the_coordinators()
    assert len(asked - coordinators) >= 8
    assert asked - coordinators <= exported
    assert not coordinators & exported


def test_slots_and_hints_are_counted(cluster: Cluster) -> None:
    """One slot for three experts, asked one after another, and a hint for each reason there is to ask."""
    options = ("--metrics", "127.0.0.1:0")
    coordinator = cluster.member("coordinator", Role.COORDINATOR, [])
    with WorkerProcess("mini", cluster.folder, 64 << 20, DEMO_MODEL, arguments=options) as worker:
        address = worker.wait_until_listening()
        checkpoint = open_checkpoint(DEMO_MODEL)
        shape, size = checkpoint.shape, checkpoint.shape.layers[0].expert_bytes
        spec = Worker(name="mini", addresses=(address,))
        connection = greet(spec, coordinator, Timeouts(), shape, "float32", "instance-1")
        share = Share({0: (0, 1)}, {0: Cache(1, (2, 3, 4)), 1: Cache(2, (5, 6, 7))})
        store = ExpertStore(checkpoint)
        install(connection, share, store.read_bytes, DEADLINE_S, lambda _: None, lambda: False)
        store.close()
        stream = GrpcTransport(connection.stub, connection.hello.session, "mini", "float32")
        assert [ask(stream, call_of(n, expert)) for n, expert in enumerate((2, 2, 3, 4), 1)] == ["", "", "", ""]
        session = connection.hello.session
        for experts in ([5], [5]):  # the second is there already
            connection.stub.Prefetch(pb.PrefetchRequest(session=session, layer=1, experts=experts, reads=1))
            wait_until(lambda: scrape(worker)["titan_worker_waiting_hints"] == 0, "the hint's end")
        now = scrape(worker)
        stream.close()
        connection.close()
    expected = {
        "titan_worker_unpinned_slots": 3,
        "titan_worker_slot_hits_total": 2 * 4 + 1,  # the pinned ones, and one found in its slot
        "titan_worker_slot_misses_total": 3,
        "titan_worker_slot_loads_total": 3,
        "titan_worker_slot_load_bytes_total": 3 * size,
        "titan_worker_slot_evictions_total": 2,
        "titan_worker_received_hints_total": 2,
        "titan_worker_late_prefetched_experts_total": 0,
    }
    assert {name: now.get(name) for name in expected} == expected
    followed, useless = (
        now[f"titan_worker_{n}"] for n in ("followed_hints_total", "dropped_hints_total{reason=useless}")
    )
    assert followed + useless == 2
    assert followed >= 1


def the_coordinators() -> set[str]:
    """What a coordinator says of its workers, by names that begin alike; tests/coordinator/metrics looks at those."""
    words = "".join(path.read_text() for path in (ROOT / "coordinator/metrics").glob("*.py"))
    names = re.findall(r'"(titan_worker_[a-z_]+)"', words)
    assert names
    return {f"{name}{end}" for name in names for end in ("", "_total")}


def fail_handshakes(port: int, context: ssl.SSLContext, count: int) -> None:
    for _ in range(count):
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(socket.create_connection(("127.0.0.1", port), DEADLINE_S)) as secure,
        ):
            secure.recv(1)


def test_strangers_cannot_fill_the_log(cluster: Cluster, tmp_path: Path) -> None:
    """200 failed handshakes on each port, and 40 calls by somebody who may not: few lines, and how many there were."""
    foreign = make_cluster(tmp_path / "foreign").member("coordinator", Role.COORDINATOR, [])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(foreign.cert_path, foreign.key_path)
    with WorkerProcess("mini", cluster.folder, 1 << 20, arguments=("--metrics", "127.0.0.1:0")) as worker:
        worker.wait_until_listening()
        grpc_port = int(worker.address.rpartition(":")[2])
        fail_handshakes(grpc_port, context, 200)
        fail_handshakes(int(entry(worker)["lane_port"]), context, 200)
        operator = cluster.member("me", Role.OPERATOR, [])
        with open_channel("mini", worker.address, operator, timeout_s=DEADLINE_S, options=LIMITS) as channel:
            for _ in range(40):
                with pytest.raises(grpc.RpcError, match="role operator"):
                    WorkerStub(channel.channel).Probe(pb.ProbeRequest(), timeout=DEADLINE_S)
        wait_until(lambda: refused(worker) == 200, "counting the lanes that were refused")
        now = scrape(worker)
        assert now["titan_worker_connections_total{port=grpc}"] == 202
        assert now["titan_worker_proved_connections_total{port=grpc}"] == 1
        assert now["titan_worker_refusals_total{by=gate,reason=role_refused}"] == 40
    lines = [str(line.get("message", "")) for line in worker.log]
    assert len(lines) <= 2 * BURST + 8, lines
    assert all("ts" in line for line in worker.log), lines  # nothing but Titan's own
    counted = {line["message"]: line["count"] for line in worker.log if "count" in line}
    assert [message.partition(":")[0] for message in counted] == [
        "connections that made no call",
        "lane refused",
        "call refused",
    ]
    assert list(counted.values()) == [201, 200 - BURST, 40 - BURST]  # 201: the operator looked at the certificate first


def refused(worker: WorkerProcess) -> float:
    return scrape(worker).get("titan_worker_refusals_total{by=lane,reason=handshake}", 0)
