"""A worker that answers every request with its own rows: the other end of `titan bench net`.

Everything but the experts is a worker's own: TLS, Hello, tokens, lanes, gRPC, queue, MLX thread. Beside it listen two
bare echoes, one over TLS and one over TCP, that return as many bytes as they read.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from titan.common.config.address import normalise_address
from titan.common.console import run_command
from titan.common.errors import TitanError
from titan.common.log import get_logger, setup_logging
from titan.common.security.credentials import load_credentials_dir
from titan.common.security.identity import Role
from titan.common.security.tls import server_ssl_context
from titan.common.units import parse_size
from titan.common.wire.lane import set_options
from titan.common.wire.messages import ExecuteCall, ExecuteResult
from titan.worker.engine import MLXThread
from titan.worker.server import WorkerServer
from titan.worker.service import WorkerService

log = get_logger("worker.echo")

MAX_ECHO_BYTES = 1 << 20
IDLE_S = 60.0


def echo(calls: Sequence[ExecuteCall]) -> list[ExecuteResult | TitanError]:
    """Pair i's output is its row."""
    return [ExecuteResult(call.request_id, call.activations[call.pair_rows], 0, 0) for call in calls]


def serve(
    certs: Annotated[Path, typer.Option()],
    listen: Annotated[str, typer.Option()] = "127.0.0.1:0",
    name: Annotated[str | None, typer.Option()] = None,
    memory: Annotated[str, typer.Option()] = "1MiB",
    log_format: Annotated[str, typer.Option()] = "json",
    with_parent: Annotated[bool, typer.Option("--with-parent")] = False,
) -> None:
    """Echo until SIGTERM, or until the parent ends."""
    setup_logging(log_format, "INFO")
    credentials = load_credentials_dir(certs, role=Role.WORKER, name=name)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    mlx_thread = MLXThread()
    service = WorkerService(credentials.identity.name, mlx_thread, parse_size(memory))
    mlx_thread.serve(echo)
    server = WorkerServer(service, mlx_thread, credentials, normalise_address(listen, any_port=True), 0)
    tcp = _listen(None)
    tls = _listen(server_ssl_context(credentials))
    log.info("listening", address=server.address, lane_port=server.lane_port, tcp_port=tcp, tls_port=tls)
    parent = os.getppid()
    while not stopping.wait(1.0) and not (with_parent and os.getppid() != parent):
        pass
    server.close()


def _listen(context: ssl.SSLContext | None) -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, context), daemon=True).start()
    return listener.getsockname()[1]


def _accept(listener: socket.socket, context: ssl.SSLContext | None) -> None:
    while True:
        sock, _ = listener.accept()
        set_options(sock)
        threading.Thread(target=_echo, args=(sock, context), daemon=True).start()


def _echo(sock: socket.socket, context: ssl.SSLContext | None) -> None:
    """Messages of a length that the first four bytes say, returned as they are: the least that a socket can do."""
    buffer = memoryview(bytearray(MAX_ECHO_BYTES))
    with contextlib.suppress(OSError, ValueError):
        sock.settimeout(IDLE_S)
        if context is not None:
            sock = context.wrap_socket(sock, server_side=True)
        with sock:
            sock.setblocking(True)
            while read_message(sock, buffer):
                sock.sendall(buffer[: message_bytes(buffer)])


def message_bytes(buffer: memoryview) -> int:
    return int.from_bytes(buffer[:4], "little")


def read_message(sock: socket.socket, buffer: memoryview) -> bool:
    """Read one message into `buffer`; False at the end."""
    got = 0
    while got < 4 or got < message_bytes(buffer):
        count = sock.recv_into(buffer[got:])
        if count == 0:
            return False
        got += count
    return True


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(serve)


if __name__ == "__main__":
    run_command(app, "titan-echo")
