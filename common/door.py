"""Connections whose peers have not shown yet who they are: few at a time, so that strangers keep nobody out.

When one more comes than is let in, whoever has the most of them loses the one that has waited longest. Knows sockets
only so far as to end them; each connection's own deadline is its server's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading

V6_PREFIX_BITS = 64  # what one machine may choose its addresses from


class Door:
    """At most `most` connections between TCP's accept and the proof of who is there. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: dict[socket.socket, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, sock: socket.socket, host: str) -> bool:
        """Let a connection from `host` in; False when another one was ended to make room."""
        with self._lock:
            room = len(self._inside) < self._most
            if not room:
                self._show_out()
            self._inside[sock] = _group(host)
        return room

    def leave(self, sock: socket.socket) -> None:
        """The connection has been accepted, refused or ended; to be called before it is closed."""
        with self._lock:
            self._inside.pop(sock, None)

    def close(self) -> None:
        """End all connections that are inside."""
        with self._lock:
            for sock in self._inside:
                _end(sock)
            self._inside.clear()

    def _show_out(self) -> None:
        groups = list(self._inside.values())
        crowd = max(dict.fromkeys(groups), key=groups.count)
        longest = next(sock for sock, group in self._inside.items() if group == crowd)
        del self._inside[longest]
        _end(longest)


def _group(host: str) -> str:
    """Who counts as one peer: an IPv4 address, or the network that an IPv6 address is from."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, V6_PREFIX_BITS), strict=False))
    return str(address)


def _end(sock: socket.socket) -> None:
    """Whoever waits for the socket sees its end; the descriptor stays its owner's."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
