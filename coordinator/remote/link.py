"""One worker over time: a keeper thread connects, installs, watches, and takes the worker back after a failure.

A failure on the data path ends the session at once; the keeper tries again with growing, jittered pauses, each time as
a new session whose slot table the worker states anew. Knows nothing of layers under way: dispatch holds those.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from titan.common.config.hosts import Timeouts, Worker
from titan.common.errors import ClusterError, ExpertLost, TitanError, WorkerDraining, WorkerLost, WorkerRefused
from titan.common.log import get_logger
from titan.common.registry.shape import ModelShape
from titan.common.security.tls import client_ssl_context
from titan.common.units import format_bytes, format_seconds
from titan.coordinator.certificates import Certificates
from titan.coordinator.moe.workers import ReadyWorker
from titan.coordinator.remote.breaker import Breaker
from titan.coordinator.remote.choose import faster, probing_call
from titan.coordinator.remote.connection import Connection, from_rpc_error
from titan.coordinator.remote.greet import greet
from titan.coordinator.remote.grpc_transport import GrpcTransport
from titan.coordinator.remote.install import Progress, ReadBytes, install
from titan.coordinator.remote.lane_transport import open_lane
from titan.coordinator.remote.probe import probe_pair_s, probe_power_w
from titan.coordinator.remote.renew import due, reopen, retire
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.share import Cache, Share
from titan.coordinator.remote.transport import Transport
from titan.proto.titan.v1 import worker_pb2 as pb

log = get_logger("coordinator.workers")

HEARTBEAT_S = 1.0
RENEW_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """A worker as people see it: state is "connecting", "greeted", "installing", "ready", "away" or "closed"."""

    name: str
    state: str
    reason: str = ""
    address: str = ""
    epoch: int = 0
    progress: Progress | None = None


class WorkerLink:
    """Keeps one worker in use as far as it can be.

    Args:
        worker: name and addresses from hosts.yaml.
        read_bytes: reads the experts that it has to be given.
        transport: "auto", "lane" or "grpc", as hosts.yaml has it.
        reduced: whether requests will carry scores (hosts.yaml's precision).
    """

    def __init__(
        self,
        worker: Worker,
        certificates: Certificates,
        timeouts: Timeouts,
        shape: ModelShape,
        dtype: str,
        instance_id: str,
        read_bytes: ReadBytes,
        transport: str = "auto",
        *,
        reduced: bool = False,
    ) -> None:
        self.name = worker.name
        self.ready: ReadyWorker | None = None
        self.memory_budget_bytes: int | None = None
        self.has_checkpoint: bool | None = None
        self.cache_bytes = 0
        self.last_status: pb.StatusReply | None = None
        self.power_w: float | None = None
        self.times_set_aside = 0
        self._worker, self._certificates, self._timeouts = worker, certificates, timeouts
        self._shape, self._dtype, self._instance_id = shape, dtype, instance_id
        self._read_bytes, self._mode, self._reduced = read_bytes, transport, reduced
        self._reconnect = self._power_asked = False
        self._share: Share | None = None
        self._installed: Share | None = None
        self._status = LinkStatus(worker.name, "connecting")
        self._changed = threading.Condition()
        self.breaker = Breaker(timeouts.readmit, timeouts.readmit_max)
        self._served_since: float | None = None
        self._stop = False
        self._lost: TitanError | None = None
        self._thread = threading.Thread(target=self._keep, name=f"titan-keeper-{worker.name}", daemon=True)

    # for the coordinator --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def status(self) -> LinkStatus:
        return self._status

    @property
    def reads(self) -> bool:
        """Whether it serves experts from its own disk: from a checkpoint, or what it keeps of what it is sent."""
        return bool(self.has_checkpoint or self.cache_bytes)

    @property
    def fetch_s(self) -> float | None:
        """Mean seconds that a request waited for one of its reads, as the worker last said (its lambda)."""
        demanded = self.demanded
        return self.last_status.cache.stall_s / demanded if self.last_status is not None and demanded > 0 else None

    @property
    def demanded(self) -> int:
        """Its reads that requests waited for, as it last said."""
        cache = self.last_status.cache if self.last_status is not None else None
        return max(0, cache.loads - cache.prefetched) if cache is not None else 0

    def assign(self, pinned: Mapping[int, tuple[int, ...]], caches: Mapping[int, Cache] | None = None) -> None:
        """What the worker is to hold, and to read when asked, from now on; installed as soon as it is connected.

        A worker in use exchanges its experts while it executes: what it is to give up is not asked of it any more,
        what it gets is asked when it is there.
        """
        with self._changed:
            held = {layer: tuple(experts) for layer, experts in pinned.items() if experts}
            self._share = Share(held, dict(caches or {}))
            self._changed.notify_all()

    @property
    def addresses(self) -> tuple[str, ...]:
        """In the order in which they are tried."""
        return tuple(self._worker.addresses)

    def prefer(self, address: str) -> None:
        """Try this address first from now on; the others stay to fall back on.

        A session over another one is given up and opened anew. Not while layers are being executed.
        """
        with self._changed:
            others = [other for other in self._worker.addresses if other != address]
            self._worker = self._worker.model_copy(update={"addresses": (address, *others)})
            if self._status.state in ("greeted", "installing", "ready") and self._status.address != address:
                self._reconnect = True
                self.ready = None
                self._status = LinkStatus(self.name, "connecting")
            self._changed.notify_all()

    @property
    def settled(self) -> bool:
        """It holds what was assigned last, or is not there to be waited for."""
        with self._changed:
            state = self._status.state
            return state in ("away", "closed") or (state == "ready" and self._installed is self._share)

    def wait(self, states: tuple[str, ...], deadline: float) -> bool:
        """Wait until the state is one of `states` or `deadline` (time.monotonic) has come."""
        with self._changed:
            while self._status.state not in states:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def set_aside(self, transport: Transport, error: ClusterError) -> None:
        """The session behind `transport` failed: stop using it. Called by dispatch, returns at once.

        A worker that cannot read an expert any more goes on with what it has in memory; what it is to read is stated
        again, so that it is sent what it lacks.
        """
        with self._changed:
            if self.ready is None or self.ready.transport is not transport:
                return
            if isinstance(error, ExpertLost) and self._share is not None:
                self.ready = ReadyWorker(transport, self.ready.held, self.ready.times)
                self._share = Share(self._share.pinned, self._share.caches)
                self._changed.notify_all()
                log.warning(str(error), worker=self.name)
                return
            self.ready = None
            self.times_set_aside += 1
            self._lost = error
            self._changed.notify_all()
        log.warning(f"worker set aside: {error}", worker=self.name)

    def close(self, timeout_s: float) -> None:
        """End the session (the worker keeps its experts) and the keeper."""
        with self._changed:
            self._stop = True
            self.ready = None
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # the keeper -----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._stop:
            self.breaker.probe()
            self._served_since = None
            try:
                self._serve_once()
            except Exception as error:
                if not isinstance(error, TitanError):
                    log.error("a worker's session failed unexpectedly", exc_info=True, worker=self.name)
                    error = WorkerLost(f"the session with worker {self.name} failed ({type(error).__name__}: {error})")
                self._set_status("away", reason=str(error))
                if not self._stop:
                    self._pause(error)
        self._set_status("closed")

    def _pause(self, error: TitanError) -> None:
        served_s = time.monotonic() - self._served_since if self._served_since is not None else 0.0
        pause_s = self.breaker.open(served_s, planned=isinstance(error, WorkerDraining))
        log.warning(str(error), worker=self.name, next_try=format_seconds(pause_s))
        with self._changed:
            self._changed.wait_for(lambda: self._stop, pause_s)

    def _serve_once(self) -> None:
        """Connect, install, serve until the session is lost. Returns or raises a TitanError."""
        self._reconnect = False
        self._set_status("connecting")
        self._certificates.look_at_own()
        connection = greet(
            self._worker,
            self._certificates.current,
            self._timeouts,
            self._shape,
            self._dtype,
            self._instance_id,
            reduced=self._reduced,
        )
        transports: list[Transport] = []
        try:
            if self._mode != "grpc":
                transports += self._open_lane(connection)
            self.memory_budget_bytes = self._offered_bytes(connection)
            self.has_checkpoint = connection.hello.has_checkpoint
            self.cache_bytes = connection.hello.cache_bytes
            self._set_status("greeted", address=connection.address, epoch=connection.hello.session.epoch)
            with self._changed:
                self._changed.wait_for(lambda: self._stop or self._reconnect or self._share is not None)
                share = self._share
            if self._stop or self._reconnect or share is None:
                return
            there = self._take(connection, share)
            if not there:
                self._installed = share
                self._set_status("ready", reason="the plan gives it nothing", address=connection.address)
            else:
                probed = (connection, there.example[0], self._shape.top_k, self._timeouts.probe)
                pair_s = probe_pair_s(*probed)
                if not self._power_asked:
                    self._power_asked, self.power_w = True, probe_power_w(*probed)
                if not transports or self._mode == "auto":
                    transports.append(GrpcTransport(connection.stub, connection.hello.session, self.name, self._dtype))
                call = probing_call(self._shape, self._dtype, there, self._timeouts.probe)
                transport = faster(transports, call)
                times = ReplyTimes(self._timeouts.execute, pair_s, there.served)
                self._use(connection, share, there, transport, times)
            self.breaker.close()
            self._served_since = time.monotonic()
            while (fresh := self._wait_until_due(connection)) is not None:
                before, connection = connection, fresh[0]
                transports = self._exchange_keys(transports, fresh[1], connection, before.address)
                before.close()
        finally:
            self.ready = None
            if self._stop:
                self._say_goodbye(connection)
            for transport in transports:
                transport.close()
            connection.close()

    def _take(self, connection: Connection, share: Share) -> Share:
        """Have the worker hold and serve `share`; what of it is there then.

        One that came back with nothing on its disk to read from is given what it is to hold, and reads nothing.
        """
        if share.caches and not self.reads:
            log.warning("worker has nothing on its disk to read from: it reads nothing of its part", worker=self.name)
            share = Share(share.pinned)
        started = time.monotonic()
        self._set_status("installing", address=connection.address, epoch=connection.hello.session.epoch)
        there = install(
            connection, share, self._read_bytes, self._timeouts.assign_idle, self._set_progress, lambda: self._stop
        )
        progress = self._status.progress
        asked, served = (sum(len(cache.experts) for cache in s.caches.values()) for s in (share, there))
        if served < asked:
            log.warning(
                "worker has no room on its disk for all experts that it is to read",
                worker=self.name,
                serves=f"{served} of {asked}",
            )
        log.info(
            "experts installed",
            worker=self.name,
            experts=sum(len(e) for e in share.pinned.values()),
            received=format_bytes(progress.bytes_total if progress else 0),
            took=format_seconds(time.monotonic() - started),
        )
        return there

    def _use(
        self,
        connection: Connection,
        share: Share,
        there: Share,
        transport: Transport,
        times: ReplyTimes,
    ) -> None:
        """Of `share` the worker has what is `there`: let dispatch use it."""
        with self._changed:
            self._lost = None
            self._installed = share
            self.ready = ReadyWorker(transport, there.held, times, there.served)
        self._set_status("ready", address=connection.address, epoch=connection.hello.session.epoch)
        log.info(
            "worker ready",
            worker=self.name,
            address=connection.address,
            epoch=connection.hello.session.epoch,
            transport=transport.name,
            pair_us=round(times.pair_s * 1e6, 1),
        )

    def _exchange_experts(self, connection: Connection) -> None:
        """The plan changed: give up what is not wanted any more, then take what is new, while executing."""
        with self._changed:
            share, old, ready = self._share, self._installed, self.ready
            if share is None or old is None or ready is None:
                return
            kept = {layer: _kept(layer, old, share) for layer in share.pinned}
            self.ready = ReadyWorker(ready.transport, kept, ready.times)
            self._changed.wait_for(lambda: self._stop, self._timeouts.execute)  # what was asked before is answered
        there = self._take(connection, share)
        with self._changed:
            lost = self.ready is None
        if not lost:
            times = ready.times
            if there.caches:
                times = ReplyTimes(self._timeouts.execute, ready.times.pair_s, there.served)
            self._use(connection, share, there, ready.transport, times)

    def _offered_bytes(self, connection: Connection) -> int:
        offered = connection.hello.memory_budget_bytes
        return offered if self._worker.memory is None else min(offered, self._worker.memory)

    def _open_lane(self, connection: Connection) -> list[Transport]:
        """The lane that Hello offered; none when `auto` may do without.

        Raises:
            ClusterError: hosts.yaml wants a lane and there is none.
        """
        try:
            if not connection.hello.lane_port:
                raise WorkerRefused(f"worker {self.name} offers no lane", "set `transport: grpc` or `auto`")
            context = client_ssl_context(connection.credentials)
            timeout_s = self._timeouts.connect + self._timeouts.hello
            return [open_lane(connection.address, connection.hello, context, self.name, self._dtype, timeout_s)]
        except ClusterError as error:
            if self._mode == "lane":
                raise
            log.warning(f"no lane, gRPC is used: {error}", worker=self.name)
            return []

    def _wait_until_due(self, connection: Connection) -> tuple[Connection, Transport | None] | None:
        """Watch the session until it wants new keys, or its preferred address is there again; the channel and transport
        that have them. None when it is over.

        Raises:
            TitanError: it was lost.
        """
        try_again, stale = 0.0, False
        look_back = time.monotonic() + self._timeouts.readmit_max
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._stop or self._reconnect or self._lost is not None or self._share is not self._installed
                    ),
                    HEARTBEAT_S,
                )
                error, self._lost = self._lost, None
                moved = self._share is not self._installed
                if isinstance(error, WorkerDraining):  # what it was sent before is still answered
                    self._changed.wait_for(lambda: self._stop, self._timeouts.execute)
            if error is not None:
                raise error
            if self._stop or self._reconnect:
                return None
            if moved and self.ready is None:
                return None  # it held nothing until now: a session of its own begins
            if moved:
                self._exchange_experts(connection)
                continue
            self._heartbeat(connection)
            if self._lost is not None:
                continue
            self._certificates.look_at_own()
            stale |= self._certificates.look_at(connection.checked)
            transport, newest = self.ready.transport if self.ready is not None else None, self._certificates.current
            preferred = self._worker.addresses[0]
            if connection.address != preferred and time.monotonic() > look_back:
                try:
                    return reopen(connection, transport, newest, self._timeouts, self._dtype, preferred)
                except TitanError as error:
                    look_back = time.monotonic() + self._timeouts.readmit_max
                    log.debug(f"the session stays at {connection.address}: {error}", worker=self.name)
            if time.monotonic() > try_again and (stale or due(connection, transport, newest)):
                try:
                    return reopen(connection, transport, newest, self._timeouts, self._dtype)
                except TitanError as error:
                    try_again = time.monotonic() + RENEW_RETRY_S
                    log.warning(f"the connection keeps its keys for now: {error}", worker=self.name)

    def _exchange_keys(
        self, transports: list[Transport], fresh: Transport | None, connection: Connection, address: str
    ) -> list[Transport]:
        """Have dispatch use `fresh`; the old transports, to `address`, end when nothing is under way on them."""
        elsewhere = connection.address != address
        with self._changed:
            ready = self.ready
            if ready is not None and fresh is not None:
                times = ready.times
                if elsewhere:  # how long replies took there says nothing here
                    times = ReplyTimes(self._timeouts.execute, times.pair_s, ready.served)
                self.ready = ReadyWorker(fresh, ready.held, times, ready.served)
        if elsewhere:
            self._set_status("ready", self._status.reason, connection.address, self._status.epoch)
        for transport in transports:
            retire(transport, self._timeouts.execute, self._pause_s)
        log.info(
            "connection renewed",
            worker=self.name,
            address=connection.address,
            transport=fresh.name if fresh is not None else "-",
        )
        return [fresh] if fresh is not None else []

    def _pause_s(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stop, seconds)

    def _heartbeat(self, connection: Connection) -> None:
        """Notice an idle worker that is gone or about to go; a busy one shows it on the data path first."""
        try:
            reply = connection.stub.Status(pb.StatusRequest(), timeout=self._timeouts.probe)
        except grpc.RpcError as error:
            self._lose(from_rpc_error(error, self.name, "Status"))
            return
        self.last_status = reply
        if reply.state == "draining":
            self._lose(WorkerDraining(f"worker {self.name} is shutting down"))
        try:
            connection.check_trust(reply.revocation_number, self._timeouts.probe)
        except TitanError as error:
            self._lose(error)

    def _lose(self, error: TitanError) -> None:
        with self._changed:
            if self._lost is not None:
                return  # dispatch was faster
            self.ready = None
            self._lost = error
        log.warning(f"worker set aside: {error}", worker=self.name)

    def _say_goodbye(self, connection: Connection) -> None:
        try:
            connection.stub.Drain(pb.DrainRequest(session=connection.hello.session), timeout=self._timeouts.probe)
        except grpc.RpcError as error:
            log.info("worker did not answer goodbye", worker=self.name, error=str(error)[:200])

    def _set_progress(self, progress: Progress) -> None:
        status = self._status
        self._put(LinkStatus(status.name, status.state, status.reason, status.address, status.epoch, progress))

    def _set_status(self, state: str, reason: str = "", address: str = "", epoch: int = 0) -> None:
        progress = self._status.progress if state in ("installing", "ready") else None
        self._put(LinkStatus(self.name, state, reason, address, epoch, progress))

    def _put(self, status: LinkStatus) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()


def _kept(layer: int, old: Share, new: Share) -> frozenset[int]:
    """What a layer can be asked for while its experts are exchanged.

    Nothing when its size changes: a full worker must drop the old slots before it can have the new ones.
    """
    if old.slots(layer) != new.slots(layer):
        return frozenset()
    return frozenset(old.pinned.get(layer, ())).intersection(new.pinned.get(layer, ()))
