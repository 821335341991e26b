"""`titan-worker`: parse the command line, load certificates and the model's headers, serve until told to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import grpc
import typer

from titan.common.config.address import join_address, normalise_address, split_address
from titan.common.console import run_command
from titan.common.errors import AddressInUse
from titan.common.log import get_logger, setup_logging
from titan.common.platform import keep_awake, memory_budget_bytes, set_nofile_limit
from titan.common.registry import ModelShape, open_checkpoint
from titan.common.security.credentials import load_credentials_dir
from titan.common.security.identity import Role
from titan.common.security.tls import grpc_server_credentials, server_ssl_context
from titan.common.store import ExpertStore
from titan.common.units import format_bytes, parse_size
from titan.common.wire.messages import MAX_MESSAGE_BYTES
from titan.proto.titan.v1 import worker_pb2_grpc as pb_grpc
from titan.worker.engine import MLXThread
from titan.worker.lane.listener import LaneListener
from titan.worker.service import WorkerService

log = get_logger("worker")

DEFAULT_LISTEN = "0.0.0.0:7077"
DEFAULT_CERTS = Path("~/.titan/certs")
HANDLER_THREADS = 32  # streams hold one each: see MAX_SESSIONS and MAX_STREAMS_PER_SESSION
DRAIN_S = 10.0
LANES_DRAIN_S = 2.0  # for coordinators to see the announcement and close their lanes

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", HANDLER_THREADS),
    ("grpc.max_metadata_size", 8192),
)


def serve(
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one.")] = DEFAULT_LISTEN,
    model: Annotated[
        Path | None, typer.Option(help="A copy of the checkpoint. Without one, the coordinator sends the experts.")
    ] = None,
    certs: Annotated[Path, typer.Option(help="Folder with ca.pem and this worker's certificate.")] = DEFAULT_CERTS,
    name: Annotated[str | None, typer.Option(help="Which certificate, when the folder has several.")] = None,
    lane_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the lanes; 0 takes a free one.")] = 0,
    memory: Annotated[str | None, typer.Option(help="Most bytes of experts to hold, e.g. 8GiB.")] = None,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    with_parent: Annotated[
        bool, typer.Option("--with-parent", hidden=True, help="End when the process that started this one ends.")
    ] = False,
) -> None:
    """Hold experts in memory and execute them for a coordinator."""
    setup_logging(log_format, log_level)
    set_nofile_limit()
    address = normalise_address(listen, any_port=True)
    credentials = load_credentials_dir(certs.expanduser(), role=Role.WORKER, name=name)
    available = memory_budget_bytes()
    budget = parse_size(memory) if memory is not None else available
    if budget > available:
        log.warning(
            "more memory was given than the system can spare",
            given=format_bytes(budget),
            spare=format_bytes(available),
        )
    checkpoint: tuple[ModelShape, ExpertStore] | None = None
    if model is not None:
        opened = open_checkpoint(model.expanduser())
        checkpoint = (opened.shape, ExpertStore(opened))

    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    if with_parent:
        threading.Thread(target=_follow_parent, args=(os.getppid(), stopping), daemon=True).start()

    mlx_thread = MLXThread()
    service = WorkerService(
        credentials.identity.name,
        mlx_thread,
        budget,
        None if checkpoint is None else (checkpoint[0], checkpoint[1].read_expert),
    )
    server = grpc.server(ThreadPoolExecutor(HANDLER_THREADS, thread_name_prefix="titan-rpc"), options=SERVER_OPTIONS)
    pb_grpc.add_WorkerServicer_to_server(service, server)
    host, _ = split_address(address)
    try:
        bound = server.add_secure_port(address, grpc_server_credentials(credentials))
    except RuntimeError as error:
        raise AddressInUse(
            f"{address} cannot be listened on ({_reason(error)})", "stop what uses it, or give another --listen"
        ) from error
    service.lanes = LaneListener(
        host,
        lane_port,
        server_ssl_context(credentials),
        service.tokens,
        service.execution.open_lane,
        service.execution.lane_counts,
    )
    server.start()
    with keep_awake():
        log.info(
            "listening",
            worker=credentials.identity.name,
            address=join_address(host, bound),
            lane_port=service.lanes.port,
            memory=format_bytes(budget),
            model=str(model) if model is not None else "experts are sent by the coordinator",
            fingerprint=checkpoint[0].fingerprint[:12] if checkpoint else "-",
        )
        stopping.wait()
        _drain(server, service, mlx_thread)
    if checkpoint is not None:
        checkpoint[1].close()


def _follow_parent(parent: int, stopping: threading.Event) -> None:
    while not stopping.wait(1.0):
        if os.getppid() != parent:
            stopping.set()


def _drain(server: grpc.Server, service: WorkerService, mlx_thread: MLXThread) -> None:
    """Answer what is queued, refuse what comes, free the memory."""
    started = time.monotonic()
    log.info("draining", queued=mlx_thread.queued)
    service.drain(LANES_DRAIN_S)
    finished = mlx_thread.close(DRAIN_S)
    server.stop(grace=1.0).wait(DRAIN_S)
    if not finished:
        log.warning("a request was still running at the end", waited_s=DRAIN_S)
    log.info("stopped", took_s=round(time.monotonic() - started, 3))


def _reason(error: RuntimeError) -> str:
    text = str(error)
    return "address already in use" if "in use" in text.lower() else "address in use, or not one of this machine"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(serve)


def main() -> None:
    """Entry point of `titan-worker`."""
    run_command(app, "titan-worker", listen_completed(sys.argv[1:]))


def listen_completed(arguments: list[str]) -> list[str]:
    """`--listen` without an address means the default one: `titan-worker --listen` is all that a worker needs."""
    completed: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        completed.append(argument)
        if argument == "--listen" and following.startswith("-"):
            completed.append(DEFAULT_LISTEN)
    return completed
