"""Enrolment, renewal and revocation with real processes and real connections.

Run: .venv/bin/pytest tests/cluster/test_trust.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import openai
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from fixtures.certificates import Cluster, make_cluster
from fixtures.lanes import DEADLINE_S, hello_for_lane, hello_request, open_lane_with
from fixtures.processes import CoordinatorProcess, run_titan, write_hosts

from titan.common.config.probe_status import ask_status
from titan.common.errors import ClusterError, SecurityError, TitanError, WorkerUnreachable
from titan.common.security import Credentials, Role, load_credentials_dir
from titan.common.security.channel import LIMITS, describe, open_channel, sync_revocations
from titan.common.security.ledger import issued
from titan.common.security.renewal import renew_worker
from titan.common.security.revocation import Revocations
from titan.common.security.revoke import list_bearer, revoke
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.demo.processes import WorkerProcess
from titan.deploy import DEMO_MODEL
from titan.proto.titan.v1 import trust_pb2
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1.trust_pb2_grpc import TrustStub
from titan.proto.titan.v1.worker_pb2_grpc import WorkerStub

SCENE = "SCENE II. A street in Verona.\n\n[Enter ROMEO and MERCUTIO.]\n\nROMEO.\n"
FAST = {"timeouts": {"execute": "300ms", "readmit": "100ms", "readmit_max": "500ms", "connect": "2s", "hello": "2s"}}


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = make_cluster(tmp_path / "certs")
    made.member("coordinator", Role.COORDINATOR, [])
    return made


@pytest.fixture
def worker(cluster: Cluster, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker whose folder is not the authority's."""
    there = tmp_path / "there"
    there.mkdir(mode=0o700)
    cluster.member("mini")
    for name in ("ca.pem", "mini.pem", "mini.key"):
        (there / name).write_bytes((cluster.folder / name).read_bytes())
    (there / "mini.key").chmod(0o600)
    with WorkerProcess("mini", there, 512 << 20) as process:
        process.wait_until_listening()
        yield process


def coordinator_of(cluster: Cluster, name: str = "coordinator") -> Credentials:
    return load_credentials_dir(cluster.folder, role=Role.COORDINATOR, name=name)


def revocations_of(cluster: Cluster) -> Revocations:
    return Revocations(cluster.folder / "ca.pem", cluster.authority_pem)


def test_from_no_certificate_to_serving_with_one_code(cluster: Cluster, tmp_path: Path) -> None:
    there = tmp_path / "mini" / "certs"
    command = [sys.executable, "-m", "titan.worker", "--listen", "127.0.0.1:0", "--certs", str(there), "--with-parent"]
    worker = subprocess.Popen(
        [*command, "--memory", "64MiB"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert worker.stdout is not None
    try:
        words = line = ""
        while "tries):" not in words:
            line = worker.stdout.readline()
            assert line, words
            words += line
        address = re.search(r"titan enroll (\S+)", words)
        code = re.search(r"tries\): (\S+)", words)
        assert address is not None
        assert code is not None
        enrolled = subprocess.run(
            [sys.executable, "-m", "titan.cli", "enroll", address[1], "--name", "mini", "--dir", str(cluster.folder)],
            input=code[1] + "\n",
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert enrolled.returncode == 0, enrolled.stderr
        assert "Enrolled worker mini for" in enrolled.stdout
        assert f"addresses: ['{address[1]}']" in enrolled.stdout
        while "listening" not in line:
            line = worker.stdout.readline()
            assert line, words
        assert address[1] in line  # the address that was enrolled is the one that is served
        credentials = coordinator_of(cluster)
        status = ask_status("mini", address[1], credentials, connect_s=DEADLINE_S, status_s=DEADLINE_S)
        assert status.state == "ready"
        # Somebody who comes too late finds a worker that serves, and says so.
        late = run_titan("enroll", address[1], "--dir", str(cluster.folder))
        assert late.returncode != 0
    finally:
        worker.terminate()
        assert worker.wait(DEADLINE_S) == 0
        worker.stdout.close()
    assert {p.name for p in there.iterdir()} == {"ca.pem", "mini.key", "mini.pem"}


def test_a_worker_that_waits_for_enrolment_ends_when_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titan.worker", "--listen", "127.0.0.1:0", "--certs", str(tmp_path / "none")]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert worker.stdout is not None
    with worker.stdout:
        assert "titan enroll" in worker.stdout.readline() + worker.stdout.readline()
        worker.terminate()
        assert worker.wait(DEADLINE_S) == 0
    assert not (tmp_path / "none").exists()


def test_open_connections_of_a_revoked_coordinator_end(cluster: Cluster, worker: WorkerProcess) -> None:
    old = cluster.member("old", Role.COORDINATOR, [])
    hello = hello_for_lane(worker.address, old)
    lane = open_lane_with(worker.address, hello, old)
    requests: queue.SimpleQueue[pb.ExecuteRequest | None] = queue.SimpleQueue()
    with open_channel("mini", worker.address, old, timeout_s=DEADLINE_S, options=LIMITS) as channel:
        first = pb.ExecuteRequest(session=hello.session, request_id=1, layer=1 << 20)  # refused, but the stream is open
        requests.put(first)
        stream = WorkerStub(channel.channel).Execute(iter(requests.get, None), timeout=DEADLINE_S)
        assert next(stream).failure.code
        revoke(cluster.authority, "old")
        with open_channel("mini", worker.address, coordinator_of(cluster), timeout_s=DEADLINE_S) as other:
            assert sync_revocations(other, revocations_of(cluster), timeout_s=DEADLINE_S) == 1
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        assert isinstance(ended.value, grpc.Call)
        assert ended.value.code() is grpc.StatusCode.CANCELLED  # and not by its deadline
        requests.put(None)

        def lane_ended() -> bool:
            try:
                lane.receive()
            except ClusterError:
                return True
            return False

        until(lane_ended, "the lane is still open")
        lane.close()
        with pytest.raises(grpc.RpcError, match="was revoked"):
            WorkerStub(channel.channel).Hello(hello_request(), timeout=DEADLINE_S)
    assert (worker_folder(worker) / "revoked.pem").exists()


def worker_folder(worker: WorkerProcess) -> Path:
    arguments = worker.process.args
    assert isinstance(arguments, list)
    return Path(str(arguments[arguments.index("--certs") + 1]))


def test_an_old_list_brings_nobody_back_and_a_newer_one_spreads(cluster: Cluster, worker: WorkerProcess) -> None:
    cluster.member("a", Role.COORDINATOR, [])
    cluster.member("b", Role.COORDINATOR, [])
    first = revoke(cluster.authority, "a").revocations
    known = revocations_of(cluster)
    second = revoke(cluster.authority, "b").revocations
    with open_channel("mini", worker.address, coordinator_of(cluster), timeout_s=DEADLINE_S) as channel:
        newest = revocations_of(cluster)
        assert sync_revocations(channel, newest, timeout_s=DEADLINE_S) == second.number
        assert known.current == first  # a machine that has missed the second
        assert sync_revocations(channel, known, timeout_s=DEADLINE_S) == second.number
        assert known.current == second
        assert describe(channel, timeout_s=DEADLINE_S).revocation_number == second.number
        foreign = make_cluster(cluster.folder.parent / "foreign")
        foreign.member("x")
        revoke(foreign.authority, "x")
        with pytest.raises(SecurityError, match="not made by this cluster"):
            sync_revocations(channel, revocations_of(foreign), timeout_s=DEADLINE_S)


def test_a_list_that_is_forged_damaged_or_huge_changes_nothing(cluster: Cluster, worker: WorkerProcess) -> None:
    for name in ("a", "b"):
        cluster.member(name, Role.COORDINATOR, [])
    good = revoke(cluster.authority, "a").revocations
    # A name, id and issuer like the authority's, and another key.
    key = ec.generate_private_key(ec.SECP256R1())
    liar = dataclasses.replace(cluster.authority, folder=cluster.folder.parent / "liar", key=key)
    liar.folder.mkdir(mode=0o700)
    shutil.copytree(cluster.folder / "issued", liar.folder / "issued")
    with pytest.raises(SecurityError):  # the list that it has just signed does not count for it either
        revoke(liar, "b")
    forged = (liar.folder / "revoked.pem").read_bytes()
    body = bytearray(good.pem)
    body[len(body) // 2] ^= 1
    lines = good.pem.splitlines(keepends=True)
    long = b"".join([lines[0], *lines[1:-1] * 4000, lines[-1]])
    with list_bearer(cluster.authority) as (operator, known):
        assert known.current == good
        with open_channel("mini", worker.address, operator, timeout_s=DEADLINE_S) as channel:
            trust = TrustStub(channel.channel)
            assert sync_revocations(channel, known, timeout_s=DEADLINE_S) == good.number
            kept = (worker_folder(worker) / "revoked.pem").read_bytes()
            for pem in (forged, bytes(body), long, b"x" * 900_000, b"\0" * 5_000_000):
                with pytest.raises(grpc.RpcError):
                    trust.SyncRevocations(trust_pb2.SyncRevocationsRequest(list_pem=pem), timeout=DEADLINE_S)
            assert trust.SyncRevocations(trust_pb2.SyncRevocationsRequest(), timeout=DEADLINE_S).number == good.number
    assert (worker_folder(worker) / "revoked.pem").read_bytes() == kept == good.pem
    with open_channel("mini", worker.address, coordinator_of(cluster, "b"), timeout_s=DEADLINE_S) as channel:
        assert describe(channel, timeout_s=DEADLINE_S).revocation_number == good.number


def test_a_worker_renews_its_certificate_while_it_serves(cluster: Cluster, worker: WorkerProcess) -> None:
    credentials = coordinator_of(cluster)
    hello = hello_for_lane(worker.address, credentials)
    lane = open_lane_with(worker.address, hello, credentials)
    there = worker_folder(worker)
    old_key = (there / "mini.key").read_bytes()
    with open_channel("mini", worker.address, credentials, timeout_s=DEADLINE_S) as channel:
        old = channel.peer
        renewed = renew_worker(channel, cluster.authority, days=200)
        assert renewed.serial != old.serial
        assert (renewed.name, renewed.role, set(renewed.hosts)) == (old.name, old.role, set(old.hosts))
        describe(channel, timeout_s=DEADLINE_S)  # what is open stays open
    assert lane.receive() == []
    lane.close()
    with open_channel("mini", worker.address, credentials, timeout_s=DEADLINE_S) as channel:
        assert channel.peer == renewed
        assert describe(channel, timeout_s=DEADLINE_S).certificate_expires_s == int(renewed.not_after.timestamp())
    open_lane_with(worker.address, hello_for_lane(worker.address, credentials), credentials).close()
    assert (there / "mini.key").read_bytes() != old_key
    assert load_credentials_dir(there, role=Role.WORKER).identity == renewed
    assert issued(cluster.folder, cluster.authority.cluster, "mini")[0] == renewed
    assert not (cluster.folder / "mini.key").exists()  # the old one, which `certs issue` had left here
    assert worker.stop() == 0


def test_a_worker_uses_the_certificate_that_was_put_on_its_disk(cluster: Cluster, worker: WorkerProcess) -> None:
    there, credentials = worker_folder(worker), coordinator_of(cluster)
    short = cluster.member("mini", days=10)
    lane = open_lane_with(worker.address, hello_for_lane(worker.address, credentials), credentials)
    (there / "mini.pem").write_bytes(short.cert_pem)  # for a moment the key is the old one's
    until(lambda: any("certificate on disk is not used" in said(line) for line in worker.log), "saying so")
    (there / "mini.key").write_bytes(short.key_pem)
    until(lambda: any("ends on" in said(line) and "renew mini" in said(line) for line in worker.log), "taking it")
    warning = next(line for line in worker.log if "ends on" in said(line))
    assert warning["host"] == socket.gethostname()
    with open_channel("mini", worker.address, credentials, timeout_s=DEADLINE_S) as channel:
        assert channel.peer == short.identity
    open_lane_with(worker.address, hello_for_lane(worker.address, credentials), credentials).close()
    lane.close()


def said(line: dict) -> str:
    return str(line.get("message", ""))


def test_a_renewal_that_goes_wrong_leaves_the_old_certificate(cluster: Cluster, worker: WorkerProcess) -> None:
    from titan.common.security.request import new_request

    before = {p: p.read_bytes() for p in worker_folder(worker).iterdir()}
    other = make_cluster(cluster.folder.parent / "other")
    with open_channel("mini", worker.address, coordinator_of(cluster), timeout_s=DEADLINE_S) as channel:
        stub = TrustStub(channel.channel)

        def install(pem: bytes) -> None:
            stub.InstallCertificate(trust_pb2.InstallCertificateRequest(certificate_pem=pem), timeout=DEADLINE_S)

        with pytest.raises(grpc.RpcError, match="no key waits"):
            install(b"x")
        for pem in (b"noise", cluster.member("mini2").cert_pem, new_request("mini").request_pem):
            stub.NewKey(trust_pb2.NewKeyRequest(), timeout=DEADLINE_S)
            with pytest.raises(grpc.RpcError):
                install(pem)
        with pytest.raises(TitanError):  # signed by another authority
            renew_worker(channel, other.authority)
        with pytest.raises(grpc.RpcError, match="no key waits"):
            install(b"x")
    assert {p: p.read_bytes() for p in worker_folder(worker).iterdir()} == before
    with open_channel("mini", worker.address, coordinator_of(cluster), timeout_s=DEADLINE_S) as channel:
        assert channel.peer == load_credentials_dir(worker_folder(worker), role=Role.WORKER).identity


def test_a_coordinator_drops_a_revoked_worker_and_takes_the_renewed_one_on() -> None:
    """With the commands that people use: `titan certs renew`, then `revoke`, under a running coordinator."""
    with LoopbackCluster(DEMO_MODEL, settings=FAST) as duo:
        hosts = write_hosts(duo.folder / "hosts.yaml", duo.hosts)
        common = ("--dir", str(duo.certs), "--hosts", str(hosts))
        with CoordinatorProcess(hosts) as coordinator:
            url = coordinator.wait_until_ready()
            with openai.OpenAI(base_url=url, api_key="none", timeout=30, max_retries=0) as client:

                def answer() -> str:
                    done = client.completions.create(model="default", prompt=SCENE, max_tokens=24, temperature=0)
                    return done.choices[0].text

                text = answer()
                renewed = run_titan("certs", "renew", "worker-1", "worker-2", *common)
                assert renewed.returncode == 0, renewed.stdout + renewed.stderr
                assert renewed.stdout.count("valid until") == 2
                # Here the workers use the authority's own folder: their new keys must stay.
                load_credentials_dir(duo.certs, role=Role.WORKER, name="worker-1")
                assert answer() == text
                revoked = run_titan("certs", "revoke", "worker-1", *common)
                assert revoked.returncode == 0, revoked.stdout + revoked.stderr
                assert "worker-2: knows" in revoked.stdout
                until(
                    lambda: any("worker-1" in line and "was revoked" in line for line in coordinator.log),
                    "worker-1 is still in use",
                )
                assert answer() == text
                assert not any("worker-2" in line and "set aside" in line for line in coordinator.log)
                # Now the coordinator itself: nobody listens to it any more, and it goes on alone.
                himself = run_titan("certs", "revoke", "coordinator", *common)
                assert himself.returncode == 1, himself.stdout + himself.stderr  # worker-1 is revoked and not told
                assert "worker-2: knows" in himself.stdout
                until(
                    lambda: any(
                        "worker-2" in line and "certificate of coordinator" in line for line in coordinator.log
                    ),
                    "the workers still serve a revoked coordinator",
                )
                assert answer() == text
                ready = sum("worker ready" in line for line in coordinator.log)
                issued_anew = run_titan(
                    "certs", "issue", "coordinator", "--role", "coordinator", "--force", *common[:2]
                )
                assert issued_anew.returncode == 0, issued_anew.stderr
                until(
                    lambda: sum("worker ready" in line for line in coordinator.log) > ready,
                    "the new certificate is not used",
                )
                assert answer() == text
            assert coordinator.stop() == 0
        worker = duo.hosts.workers[0]
        with pytest.raises(WorkerUnreachable, match="was revoked"):
            ask_status(worker.name, worker.addresses[0], duo.credentials, connect_s=DEADLINE_S, status_s=DEADLINE_S)
        again = run_titan("certs", "revoke", "worker-1", *common)
        assert again.returncode != 0
        assert "no valid certificate" in again.stderr


def test_revoke_and_renew_say_what_they_could_not_do(cluster: Cluster, tmp_path: Path) -> None:
    cluster.member("mini", days=10)
    cluster.member("away", days=10)
    (tmp_path / "hosts.yaml").write_text(
        "model: m\nworkers: [{name: mini, addresses: ['127.0.0.1:1']}]\ntimeouts: {connect: 500ms}\n"
    )
    common = ("--dir", str(cluster.folder), "--hosts", str(tmp_path / "hosts.yaml"))
    renewed = run_titan("certs", "renew", *common)
    assert renewed.returncode == 1
    assert "mini: 127.0.0.1 is there, but nothing listens on port 1" in renewed.stdout
    assert "worker away: not in" in renewed.stdout
    assert "coordinator: valid until" in renewed.stdout  # 30 days, renewed here
    assert "nothing has to be started again" in renewed.stdout
    unknown = run_titan("certs", "renew", "nobody", *common)
    assert unknown.returncode == 2
    revoked = run_titan("certs", "revoke", "away", *common)
    assert revoked.returncode == 1
    assert "Revoked 1 certificate(s) of worker away" in revoked.stdout
    assert "mini: 127.0.0.1 is there" in revoked.stdout
    shown = run_titan("certs", "show", str(cluster.folder))
    assert "REVOKED" in shown.stdout
    alone = run_titan("certs", "revoke", "mini", "--dir", str(cluster.folder), "--hosts", str(tmp_path / "none.yaml"))
    assert alone.returncode == 0
    assert "hear of it" in alone.stdout
    with contextlib.suppress(SecurityError):
        load_credentials_dir(cluster.folder, role=Role.WORKER, name="mini")
        pytest.fail("a revoked certificate was loaded")
