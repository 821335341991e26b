"""A TCP proxy that delays both directions, as a process of its own, for measuring on one machine what a network does.

`python -m titan.coordinator.bench.delay_proxy DELAY_US LISTEN_HOST TARGET_HOST PORT …` listens on LISTEN_HOST with
the target's own port numbers, says "ready" on standard output, and ends with its standard input. It sees bytes, no TLS.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from queue import SimpleQueue

CHUNK_BYTES = 256 << 10
CONNECT_S = 5.0


def _pump(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Pass bytes on, each `delay_s` after it came."""
    waiting: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def write() -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = waiting.get()
                if (left := due - time.perf_counter()) > 0:
                    time.sleep(left)
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)

    threading.Thread(target=write, daemon=True).start()
    data = b"x"
    while data:
        try:
            data = source.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        waiting.put((time.perf_counter() + delay_s, data))


def _accept(listener: socket.socket, target: tuple[str, int], delay_s: float) -> None:
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection(target, timeout=CONNECT_S)
        except OSError:
            client.close()
            continue
        server.settimeout(None)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((client, server), (server, client)):
            threading.Thread(target=_pump, args=(*pair, delay_s), daemon=True).start()


def main(delay_us: float, listen_host: str, target_host: str, ports: list[int]) -> None:
    for port in ports:
        listener = socket.create_server((listen_host, port))
        threading.Thread(target=_accept, args=(listener, (target_host, port), delay_us / 1e6), daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3], [int(port) for port in sys.argv[4:]])
