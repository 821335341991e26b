"""`GET /metrics` for a daemon that serves no other HTTP: few connections, one answer each, a deadline on everything.

On a loopback address it speaks plain HTTP to this machine. Elsewhere it speaks TLS 1.3 to members of the cluster whom
`admit` lets in, and to nobody else. Knows no figure.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable

from titan.common.config.address import is_loopback, join_address
from titan.common.door import Door
from titan.common.errors import AddressInUse, Forbidden, TitanError
from titan.common.log import get_logger
from titan.common.metrics import CONTENT_TYPE
from titan.common.origin import check_local

log = get_logger("metrics")

ANSWER_S = 5.0  # from TCP's accept to the last byte
LOOK_S = 0.5  # how soon the end is noticed where shutting a listener down wakes nobody
MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 8192
PATH = "/metrics"


class MetricsServer:
    """Serves from the start on, each connection on a thread of its own.

    Args:
        host, port: where; port 0 takes a free one.
        text: what to answer.
        context: TLS for an address that others can reach.
        admit: given the peer's certificate (DER), raises a TitanError when it may not look.

    Raises:
        AddressInUse: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        text: Callable[[], bytes],
        context: ssl.SSLContext,
        admit: Callable[[bytes], None],
    ) -> None:
        self._host, self._text, self._admit = host, text, admit
        self._context = None if is_loopback(host) else context
        self._door = Door(MAX_CONNECTIONS)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise AddressInUse(
                f"{join_address(host, port)} cannot be listened on for metrics ({error.strerror or error})",
                "stop what uses it, or give another --metrics",
            ) from error
        self.address = join_address(host, self._listener.getsockname()[1])
        self.url = f"{'http' if self._context is None else 'https'}://{self.address}{PATH}"
        self._listener.settimeout(LOOK_S)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="titan-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more, and end what is open."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        self._door.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                plain, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                time.sleep(0.05)  # out of descriptors, or closed
                continue
            deadline = time.monotonic() + ANSWER_S
            try:
                plain.settimeout(ANSWER_S)
                sock = plain if self._context is None else _secured(plain, self._context)
            except OSError:
                plain.close()
                continue
            self._door.enter(sock, str(peer[0]))
            threading.Thread(
                target=self._serve, args=(sock, str(peer[0]), deadline), name="titan-metrics-answer", daemon=True
            ).start()

    def _serve(self, sock: socket.socket, peer: str, deadline: float) -> None:
        try:
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()  # its timeout is for the whole of it
                self._admit(sock.getpeercert(binary_form=True) or b"")
            status, body = self._answer(_read_head(sock, deadline))
            head = f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
            _write(sock, f"{head}Connection: close\r\n\r\n".encode() + body, deadline)
        except (TitanError, OSError, ValueError) as error:  # a stranger, or somebody who does not speak HTTP
            log.debug(f"metrics refused: {error}", peer=peer)
        finally:
            self._door.leave(sock)
            sock.close()

    def _answer(self, head: list[str]) -> tuple[str, bytes]:
        method, target, _ = head[0].split(" ", 2)
        if self._context is None:
            try:
                check_local(_header(head, "host"), _header(head, "origin"), self._host)
            except Forbidden as error:
                return "403 Forbidden", f"{error}\n".encode()
        if method != "GET":
            return "405 Method Not Allowed", b"GET /metrics is all there is.\n"
        if target.partition("?")[0] != PATH:
            return "404 Not Found", b"GET /metrics is all there is.\n"
        return "200 OK", self._text()


def _secured(plain: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)


def _read_head(sock: socket.socket, deadline: float) -> list[str]:
    """The request line and the headers.

    Raises:
        ValueError: too long, or ended early. OSError: the connection broke, or took too long.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(MAX_HEAD_BYTES)
        data += part
        if not part or len(data) > MAX_HEAD_BYTES:
            raise ValueError("the request ended early or is too long")
    return data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")


def _header(head: list[str], name: str) -> str | None:
    for line in head[1:]:
        key, _, value = line.partition(":")
        if key.lower() == name:
            return value.strip()
    return None


def _write(sock: socket.socket, data: bytes, deadline: float) -> None:
    left = memoryview(data)
    while left:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        left = left[sock.send(left) :]
