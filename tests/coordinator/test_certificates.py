"""Certificates that end while a coordinator runs. Run: .venv/bin/pytest tests/coordinator/test_certificates.py"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fixtures.certificates import Cluster, make_cluster
from fixtures.checkpoints import make_checkpoint
from fixtures.worker_server import DEADLINE_S, NAME, running_worker, wait_until

from titan.common.config.hosts import Timeouts, Worker
from titan.common.log import setup_logging
from titan.common.security import Role, load_credentials, load_credentials_dir
from titan.common.security.own import OwnCertificate, ending
from titan.common.security.renewal import worn
from titan.common.security.revoke import revoke
from titan.coordinator.certificates import Certificates
from titan.coordinator.remote.link import WorkerLink

LONG_AGO = timedelta(days=25)  # of thirty


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    setup_logging("text", "INFO", stream=stream)
    yield stream
    setup_logging()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return make_cluster(tmp_path / "certs")


def old_one(cluster: Cluster, name: str, role: Role) -> OwnCertificate:
    made = cluster.member(name, role, days=30, now=datetime.now(UTC) - LONG_AGO)
    return OwnCertificate(load_credentials(made.ca_path, made.cert_path, made.key_path))


def test_what_ends_and_what_is_worn(cluster: Cluster) -> None:
    now = datetime.now(UTC)
    long = cluster.member("long", days=800).identity
    for left, says in ((timedelta(days=15), ""), (timedelta(days=13, hours=1), "in 13 days"), (-LONG_AGO, "ended on")):
        assert says in ending(long, "certs/long.pem", now=long.not_after - left)
        assert bool(says) == bool(ending(long, "certs/long.pem", now=long.not_after - left))
    sentence = ending(long, "certs/long.pem", now=long.not_after - timedelta(days=3))
    for part in ("worker long", "certs/long.pem", f"{long.not_after:%Y-%m-%d}", "titan certs renew long"):
        assert part in sentence
    assert "titan-worker --enroll" in ending(long, "", now=long.not_after + LONG_AGO)
    assert worn(long, now=long.not_after - timedelta(days=29))
    assert not worn(long, now=long.not_after - timedelta(days=31))
    assert not worn(cluster.member("short", days=20).identity, now=now)  # a short one is not renewed all its life


def test_another_certificate_on_disk_is_taken_and_a_wrong_one_is_not(cluster: Cluster, tmp_path: Path) -> None:
    credentials = cluster.member("coordinator", Role.COORDINATOR)
    own = OwnCertificate(credentials)
    assert not own.refresh()
    renewed = cluster.member("coordinator", Role.COORDINATOR)
    assert own.refresh()
    assert own.current == renewed
    assert not own.refresh()
    for damage in (b"noise", cluster.member("other", Role.COORDINATOR).cert_path.read_bytes()):
        renewed.cert_path.write_bytes(damage)  # another key's
        assert not own.refresh()
        assert own.problem
        assert own.current == renewed
    other = cluster.member("other", Role.COORDINATOR)
    renewed.cert_path.write_bytes(other.cert_pem)
    renewed.key_path.write_bytes(other.key_pem)
    assert not own.refresh()
    assert "another member" in own.problem
    foreign = make_cluster(tmp_path / "foreign").member("coordinator", Role.COORDINATOR)
    for path, pem in ((renewed.cert_path, foreign.cert_pem), (renewed.key_path, foreign.key_pem)):
        path.write_bytes(pem)
    renewed.ca_path.write_bytes(foreign.ca_pem)
    assert not own.refresh()
    assert "another member or cluster" in own.problem
    assert own.current == renewed


def test_a_coordinator_with_the_authority_renews_its_own(cluster: Cluster, lines: io.StringIO) -> None:
    own = old_one(cluster, "coordinator", Role.COORDINATOR)
    before = own.current.identity
    certificates = Certificates(own)
    certificates.look_at_own()
    after = certificates.current.identity
    assert after.not_after > before.not_after + timedelta(days=700)
    assert (after.name, after.role, after.hosts) == (before.name, before.role, before.hosts)
    assert "certificate renewed" in lines.getvalue()
    certificates.look_at_own()
    assert certificates.current.identity == after


def test_a_coordinator_without_the_authority_says_so_once(cluster: Cluster, lines: io.StringIO) -> None:
    own = old_one(cluster, "coordinator", Role.COORDINATOR)
    (cluster.folder / "ca.key").rename(cluster.folder / "elsewhere")
    certificates = Certificates(own)
    for _ in range(3):
        certificates.look_at_own()
    assert lines.getvalue().count("the certificate of coordinator in") == 1
    assert "titan certs renew coordinator" in lines.getvalue()
    (cluster.folder / "coordinator.pem").write_text("x")
    certificates.look_at_own()
    certificates.look_at_own()
    assert lines.getvalue().count("the certificate on disk is not used") == 1


def test_a_workers_certificate_is_renewed_while_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "mini"
    make_checkpoint(model, layers=2, experts=8, hidden=128, width=64)
    monkeypatch.setattr("titan.worker.trust.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("titan.coordinator.remote.link.HEARTBEAT_S", 0.05)
    with running_worker(tmp_path / "certs", model) as worker:
        trust = worker.server.trust
        old = old_one(worker.cluster, NAME, Role.WORKER).current.identity  # put into its folder
        wait_until(lambda: trust.credentials.identity == old, "the worker's taking it")
        spec = Worker(name=NAME, addresses=(worker.server.address,))
        certificates = Certificates(OwnCertificate(worker.credentials))
        timeouts = Timeouts(execute=0.05)
        link = WorkerLink(
            spec, certificates, timeouts, worker.shape, worker.dtype, "instance-1", worker.store.read_bytes, "lane"
        )
        link.assign(worker.share.pinned)
        link.start()
        try:
            assert link.wait(("ready",), time.monotonic() + DEADLINE_S), link.status
            wait_until(lambda: trust.credentials.identity != old, "renewing it")
            wait_until(lambda: worker.service.execution.lane_counts.proved == 2, "a lane with the new one")
            assert link.ready is not None
            assert link.times_set_aside == 0
            assert trust.credentials.identity.not_after > old.not_after + timedelta(days=700)
        finally:
            link.close(DEADLINE_S)


def test_a_list_reaches_a_coordinator_by_way_of_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The authority is on neither machine: somebody tells the worker, and the worker's answers tell the coordinator."""
    model = tmp_path / "mini"
    make_checkpoint(model, layers=2, experts=8, hidden=128, width=64)
    monkeypatch.setattr("titan.coordinator.remote.link.HEARTBEAT_S", 0.05)
    with running_worker(tmp_path / "certs", model) as worker:
        desk = tmp_path / "desk"
        desk.mkdir(mode=0o700)
        for name in ("ca.pem", "coordinator.pem", "coordinator.key"):
            (desk / name).write_bytes((worker.cluster.folder / name).read_bytes())
        (desk / "coordinator.key").chmod(0o600)
        spec = Worker(name=NAME, addresses=(worker.server.address,))
        certificates = Certificates(OwnCertificate(load_credentials_dir(desk, role=Role.COORDINATOR)))
        timeouts = Timeouts(execute=0.05)
        link = WorkerLink(
            spec, certificates, timeouts, worker.shape, worker.dtype, "instance-1", worker.store.read_bytes, "lane"
        )
        link.assign(worker.share.pinned)
        link.start()
        try:
            assert link.wait(("ready",), time.monotonic() + DEADLINE_S), link.status
            worker.cluster.member("other", Role.COORDINATOR)
            revoke(worker.cluster.authority, "other")
            wait_until((desk / "revoked.pem").exists, "telling the coordinator")
            assert link.ready is not None
            revoke(worker.cluster.authority, "coordinator")
            assert link.wait(("away",), time.monotonic() + DEADLINE_S)
            wait_until(lambda: worker.service.execution.lane_counts.open == 0, "ending its lane")
            assert "certificate of coordinator" in link.status.reason
            assert "was revoked" in link.status.reason
        finally:
            link.close(DEADLINE_S)
