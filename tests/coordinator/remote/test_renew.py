"""A session gets new keys while it is used: no call fails, nothing is left of the old connection.

Run: .venv/bin/pytest tests/coordinator/remote/test_renew.py
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from fixtures.worker_server import DEADLINE_S, NAME, RunningWorker, wait_until

from titan.common.config.hosts import Timeouts, Worker
from titan.common.errors import TitanError, WorkerLost
from titan.common.security import Role
from titan.common.security.own import OwnCertificate
from titan.common.security.revoke import revoke
from titan.common.wire import lane as lane_module
from titan.common.wire.messages import ExecuteCall
from titan.coordinator.certificates import Certificates
from titan.coordinator.remote import renew
from titan.coordinator.remote.exchange import Exchange
from titan.coordinator.remote.link import WorkerLink

HIDDEN = 128


@pytest.fixture(params=["lane", "grpc"])
def link(worker: RunningWorker, request: pytest.FixtureRequest) -> Iterator[WorkerLink]:
    spec = Worker(name=NAME, addresses=(worker.server.address,))
    own = Certificates(OwnCertificate(worker.credentials))
    timeouts = Timeouts(execute=0.05)
    made = WorkerLink(
        spec, own, timeouts, worker.shape, worker.dtype, "instance-1", worker.store.read_bytes, request.param
    )
    made.assign(worker.share.pinned)
    made.start()
    assert made.wait(("ready",), time.monotonic() + DEADLINE_S), made.status
    yield made
    made.close(DEADLINE_S)


class Traffic:
    """Calls without a pause, as a coordinator's engine makes them."""

    def __init__(self, link: WorkerLink) -> None:
        self.calls = 0
        self.failed: list[str] = []
        self.transports: list[object] = []
        self._link, self._stop = link, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        exchange = Exchange()
        ids = np.arange(8, dtype=np.uint32)
        while not self._stop.is_set():
            ready = self._link.ready
            if ready is None:
                self.failed.append("no session")
                return
            if ready.transport not in self.transports:
                self.transports.append(ready.transport)
            x = np.full((1, HIDDEN), self.calls, np.float32)
            call = ExecuteCall(exchange.next_id(), 0, x, ids * 0, ids, False, DEADLINE_S)
            exchange.send(ready.transport, call, ids, ready.times)
            self.failed += [str(f.error) for f in exchange.collect(lambda _sent, _result: None)]
            self.calls += 1

    def end(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def test_keys_are_exchanged_between_calls(
    worker: RunningWorker, link: WorkerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch, opened = link.status.epoch, worker.service.sessions.opened
    descriptors = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(renew, "RENEW_RECORDS", 40)
    monkeypatch.setattr("titan.coordinator.remote.link.HEARTBEAT_S", 0.01)
    traffic = Traffic(link)
    try:
        wait_until(lambda: len(traffic.transports) >= 5 or bool(traffic.failed), "new keys")
    finally:
        traffic.end()
    assert not traffic.failed
    assert traffic.calls > 100
    monkeypatch.setattr(renew, "RENEW_RECORDS", 1 << 23)
    wait_until(lambda: sum(s.streams for s in worker.service.sessions.live()) == 1, "ending the old ones")
    assert (link.status.epoch, worker.service.sessions.opened) == (epoch, opened)  # the same session
    assert link.times_set_aside == 0
    wait_until(lambda: len(os.listdir("/dev/fd")) <= descriptors + 2, "giving descriptors back")


def test_a_certificate_that_was_renewed_is_used_without_a_restart(
    worker: RunningWorker, link: WorkerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan.coordinator.remote.link.HEARTBEAT_S", 0.02)
    traffic = Traffic(link)
    try:
        wait_until(lambda: traffic.calls > 10, "traffic")
        renewed = worker.cluster.member("coordinator", Role.COORDINATOR)
        wait_until(lambda: len(traffic.transports) == 2 or bool(traffic.failed), "using the new certificate")
        old = worker.credentials.identity
        worker.server.trust.gate.end_calls({old.serial})  # as a revocation would: nobody uses the old one any more
        seen = traffic.calls
        wait_until(lambda: traffic.calls > seen + 10 or bool(traffic.failed), "traffic")
    finally:
        traffic.end()
    assert not traffic.failed
    assert link._certificates.current.identity == renewed.identity != old
    assert link.times_set_aside == 0


def test_what_cannot_be_renewed_goes_on_as_it_is(
    worker: RunningWorker, link: WorkerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise WorkerLost("no answer")

    monkeypatch.setattr("titan.coordinator.remote.link.HEARTBEAT_S", 0.01)
    monkeypatch.setattr(renew, "open_channel", refuse)
    tried = threading.Event()
    monkeypatch.setattr("titan.coordinator.remote.link.RENEW_RETRY_S", 0.0)
    monkeypatch.setattr(renew, "due", lambda *_: tried.set() or True)
    monkeypatch.setattr("titan.coordinator.remote.link.due", lambda *_: tried.set() or True)
    traffic = Traffic(link)
    try:
        assert tried.wait(DEADLINE_S)
        seen = traffic.calls
        wait_until(lambda: traffic.calls > seen + 10 or bool(traffic.failed), "traffic")
    finally:
        traffic.end()
    assert not traffic.failed
    assert len(traffic.transports) == 1


def test_a_lane_ends_before_its_keys_are_worn_out(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "MAX_RECORDS", 20)
    connection = worker.connect("instance-1")
    lane = worker.lane(connection)

    def ping_often() -> None:
        for _ in range(30):
            lane.ping(b"x", DEADLINE_S)

    with pytest.raises(WorkerLost, match=r"keys are used up|closed"):
        ping_often()
    assert lane.records <= 22
    wait_until(lambda: worker.service.execution.lane_counts.open == 0, "ending it there")
    lane.close()
    connection.close()


def test_keys_are_due_by_records_age_and_certificate(worker: RunningWorker) -> None:
    connection = worker.connect("instance-1")
    lane = worker.lane(connection)
    assert not renew.due(connection, lane, connection.credentials)
    assert renew.due(connection, lane, replace(connection.credentials))
    lane._lane._records_received = renew.RENEW_RECORDS
    assert renew.due(connection, lane, connection.credentials)
    assert not renew.due(connection, None, connection.credentials)
    connection.opened_s -= renew.RENEW_AFTER_S
    assert renew.due(connection, None, connection.credentials)
    lane.close()
    connection.close()


def test_a_revoked_worker_gets_no_new_connection(worker: RunningWorker) -> None:
    connection = worker.connect("instance-1")
    revoke(worker.cluster.authority, NAME)
    with pytest.raises(TitanError, match="revoked"):
        renew.reopen(connection, None, connection.credentials, Timeouts(), worker.dtype)
    connection.close()
