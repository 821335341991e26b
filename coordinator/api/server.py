"""Listens and runs the app: a uvicorn server that binds first and stops within a deadline. Knows no endpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from titan.common.config.address import join_address
from titan.common.errors import AddressInUse, ConfigError
from titan.coordinator.api.limits import Limits
from titan.coordinator.api.protocol import bounded_protocol

__all__ = ["ApiServer"]

_BACKLOG = 128


class ApiServer:
    """One listening socket and the server on it.

    The socket is bound when this is made, so that a taken port is known before a model is loaded.

    Args:
        host: name or address to listen on; the first address of a name counts.
        port: 0 takes a free one.

    Raises:
        AddressInUse: somebody listens there already.
        ConfigError: the host is not one of this machine's, or the port needs more rights.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self._socket = _bind(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=bounded_protocol(limits),
            ws="none",
            lifespan="off",
            loop="asyncio",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=limits.keep_alive_s,
            timeout_graceful_shutdown=limits.shutdown_s,
            h11_max_incomplete_event_size=limits.head_bytes,
        )
        self._server = _Server(config)

    @property
    def address(self) -> str:
        """`host:port` as clients write it."""
        return join_address(self.host, self.port)

    @property
    def started(self) -> bool:
        """Connections are accepted."""
        return self._server.started

    @property
    def received_signal(self) -> int | None:
        """SIGINT or SIGTERM, if that is what ended `run`."""
        return self._server.received_signal

    def run(self) -> None:
        """Serve until `stop`, SIGINT or SIGTERM (in the main thread); answers under way get `limits.shutdown_s`."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Make `run` return. From any thread or signal handler, any number of times."""
        self._server.should_exit = True

    def close(self) -> None:
        """Let go of the socket when `run` was never called."""
        self._socket.close()


class _Server(uvicorn.Server):
    received_signal: int | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """As uvicorn's, but a signal is not raised again afterwards: engine and workers are still to be closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.force_exit = self.should_exit and number == signal.SIGINT  # a second Ctrl-C waits for nobody
        self.should_exit = True
        self.received_signal = number


def _bind(host: str, port: int) -> socket.socket:
    address = join_address(host, port)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error}", "use an address of this machine") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{address} is in use by another program", "stop it, or set another port in coordinator.listen"
            ) from error
        mend = "use a port from 1024 on" if error.errno == errno.EACCES else "use an address of this machine"
        raise ConfigError(f"cannot listen on {address}: {os.strerror(error.errno or 0)}", mend) from error
    return listener
