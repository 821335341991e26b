"""Round trips over loopback: lane, gRPC, a bare TLS socket and a bare TCP socket, interleaved in one run.

`lane` is a frame there and back. `lane_execute` and `grpc` are calls of one row that come back as one row: through the
coordinator's exchange, the checks of both sides, the worker's queue and its MLX thread. The bare sockets carry as many
bytes and do nothing else. The two ends are two processes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan.common.arrays import COMPUTE_DTYPES, compute_dtype
from titan.common.config.hosts import Timeouts, Worker
from titan.common.registry.shape import ComponentSpec, LayerSpec, MatrixSpec, ModelShape
from titan.common.security.authority import init_authority, issue
from titan.common.security.credentials import Credentials, load_credentials_dir
from titan.common.security.identity import Role, tls_name
from titan.common.security.tls import client_ssl_context
from titan.common.wire.lane import set_options
from titan.common.wire.messages import ExecuteCall
from titan.coordinator.demo.processes import WorkerProcess
from titan.coordinator.remote.exchange import Exchange
from titan.coordinator.remote.greet import greet
from titan.coordinator.remote.grpc_transport import GrpcTransport
from titan.coordinator.remote.lane_transport import open_lane
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.transport import Transport

ECHO = (sys.executable, "-m", "titan.worker.echo")
WORKER = "echo"
SIZES_BYTES = (4096, 8192, 16384)
VARIANTS = ("lane", "lane_execute", "grpc", "tls_socket", "tcp_socket")
BATCH = 25  # round trips of one variant before the next has its turn
WARM_UP = 50
DEADLINE_S = 10.0

RoundTrip = Callable[[], None]


@dataclass(frozen=True, slots=True)
class NetFigures:
    """Microseconds a round trip of one size, by variant; `ratio` is lane over bare TLS socket, median to median."""

    payload_bytes: int
    p50_us: dict[str, float]
    p95_us: dict[str, float]
    ratio: float


def bench_loopback(
    round_trips: int, cores: str, on_size: Callable[[int], None] = lambda _size: None
) -> list[NetFigures]:
    """Measure `round_trips` of each variant at each size.

    Args:
        cores: "same" keeps both ends on one core, so that no figure depends on where the scheduler happens to put
            them; "apart" keeps them on two, so that every message wakes a core; "free" lets the scheduler choose.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="titan-bench-")))
        authority = init_authority(folder)
        issue(authority, WORKER, role=Role.WORKER, hosts=["localhost"], days=1)
        issue(authority, "coordinator", role=Role.COORDINATOR, hosts=["localhost"], days=1)
        credentials = load_credentials_dir(folder, role=Role.COORDINATOR)
        with _pinned(cores, server=True):
            process = stack.enter_context(WorkerProcess(WORKER, folder, 1 << 20, program=ECHO, own_cores=False))
            process.wait_until_listening()
        stack.enter_context(_pinned(cores, server=False))
        ports = next(entry for entry in process.log if entry.get("message") == "listening")
        figures = []
        for size in SIZES_BYTES:
            on_size(size)
            with ExitStack() as opened:
                ways = _ways(opened, process.address, ports, credentials, size)
                figures.append(_measure(ways, size, round_trips))
        return figures


def _measure(ways: dict[str, RoundTrip], size: int, round_trips: int) -> NetFigures:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(WARM_UP):
            way()
    for _ in range(max(1, round_trips // BATCH)):
        for name, way in ways.items():
            for _ in range(BATCH):
                started = time.perf_counter()
                way()
                times[name].append((time.perf_counter() - started) * 1e6)
    p50 = {name: round(statistics.median(values), 1) for name, values in times.items()}
    p95 = {name: round(statistics.quantiles(values, n=20)[-1], 1) for name, values in times.items()}
    return NetFigures(size, p50, p95, round(p50["lane"] / p50["tls_socket"], 3))


def _ways(stack: ExitStack, address: str, ports: dict, credentials: Credentials, size: int) -> dict[str, RoundTrip]:
    context = client_ssl_context(credentials)
    dtype = compute_dtype({"F32"})
    shape = _shape(size // COMPUTE_DTYPES[dtype][0].itemsize)
    timeouts = Timeouts()
    worker = Worker(name=WORKER, addresses=(address,))
    connection = greet(worker, credentials, timeouts, shape, dtype, secrets.token_hex(8))
    stack.callback(connection.close)
    lane = open_lane(address, connection.hello, context, WORKER, dtype, DEADLINE_S)
    stack.callback(lane.close)
    grpc = GrpcTransport(connection.stub, connection.hello.session, WORKER, dtype)
    stack.callback(grpc.close)
    call = ExecuteCall(
        request_id=0,
        layer=0,
        activations=np.ones((1, shape.hidden_size), COMPUTE_DTYPES[dtype][0]),
        pair_rows=np.zeros(1, np.uint32),
        pair_experts=np.zeros(1, np.uint32),
        sort=False,
        deadline_s=DEADLINE_S,
    )
    payload = bytes(size)
    tls = _connect(stack, int(ports["tls_port"]), context)
    tcp = _connect(stack, int(ports["tcp_port"]), None)
    return {
        "lane": lambda: lane.ping(payload, DEADLINE_S),
        "lane_execute": _by_transport(lane, call),
        "grpc": _by_transport(grpc, call),
        "tls_socket": _by_socket(tls, size),
        "tcp_socket": _by_socket(tcp, size),
    }


def _by_transport(transport: Transport, call: ExecuteCall) -> RoundTrip:
    exchange = Exchange()
    positions = np.zeros(1, np.intp)
    times = ReplyTimes(DEADLINE_S, 0.0)
    results: list[int] = []

    def round_trip() -> None:
        results.clear()
        exchange.send(transport, call._replace(request_id=exchange.next_id()), positions, times)
        failed = exchange.collect(lambda _, result: results.append(result.request_id))
        if failed:
            raise failed[0].error

    return round_trip


def _by_socket(sock: socket.socket, size: int) -> RoundTrip:
    message = memoryview(bytearray(size))
    message[:4] = size.to_bytes(4, "little")
    answer = memoryview(bytearray(size))

    def round_trip() -> None:
        sock.sendall(message)
        got = 0
        while got < size:
            got += sock.recv_into(answer[got:])

    return round_trip


def _connect(stack: ExitStack, port: int, context: ssl.SSLContext | None) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    stack.callback(sock.close)
    set_options(sock)
    if context is not None:
        sock = stack.enter_context(context.wrap_socket(sock, server_hostname=tls_name(WORKER, Role.WORKER)))
    sock.setblocking(True)
    return sock


def _shape(hidden_size: int) -> ModelShape:
    """A model of one layer and one expert, whose rows have the size wanted."""
    matrices = tuple(
        MatrixSpec(name, hidden_size, hidden_size, (ComponentSpec("weight", "F32", (hidden_size, hidden_size)),))
        for name in ("gate", "up", "down")
    )
    layer = LayerSpec(0, "echo", matrices)  # type: ignore[arg-type]  # three of them
    return ModelShape(f"{hidden_size:064x}", "echo", hidden_size, 1, 1, 1, (layer,))


@contextlib.contextmanager
def _pinned(cores: str, *, server: bool) -> Iterator[None]:
    """Keep this process, and those it starts meanwhile, on a core; nothing where the system cannot."""
    if cores == "free" or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    ordered = sorted(before)
    core = ordered[-1] if cores == "same" or not server else ordered[0]
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
