"""Waiting for sockets on the thread that executes, so that a small request changes no thread between socket and kernel.

While that thread is busy for longer, an attendant thread reads in its stead: overload is answered at once, pings come
back, and the peer's bytes do not pile up. Whoever holds the baton reads. Knows endpoints, not frames.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from typing import Protocol

IDLE_MS = 1000


class Endpoint(Protocol):
    """Something with a socket. Its methods are called by the reader only."""

    def fileno(self) -> int: ...

    def on_readable(self) -> bool:
        """Read what has come; False when the endpoint is finished."""
        ...

    def on_writable(self) -> bool:
        """Go on sending; False when everything is out."""
        ...

    def close(self) -> None:
        """The endpoint has been taken out."""


class Poller:
    """Endpoints, a way to wake whoever waits for them, and the attendant."""

    def __init__(self, name: str = "titan-attendant") -> None:
        self._poll = select.poll()
        self._endpoints: dict[int, Endpoint] = {}
        self._added: list[Endpoint] = []
        self._blocked: list[Endpoint] = []
        self._changes = threading.Lock()
        self._baton = threading.Lock()
        self._signalled = False
        self._busy = threading.Event()
        self._closed = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poll.register(self._wake_in.fileno(), select.POLLIN)
        self._attendant = threading.Thread(target=self._attend, name=name, daemon=True)
        self._attendant.start()

    def __len__(self) -> int:
        return len(self._endpoints)

    def add(self, endpoint: Endpoint) -> None:
        """Read from `endpoint` from now on."""
        with self._changes:
            if not self._closed:
                self._added.append(endpoint)
                self.wake()
                return
        endpoint.close()

    def watch_writes(self, endpoint: Endpoint) -> None:
        """Call `on_writable` when its socket takes more."""
        with self._changes:
            self._blocked.append(endpoint)
        self.wake()

    def wake(self) -> None:
        """End the present wait of whoever reads, or the next. Make the work visible first, then call this."""
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(BlockingIOError):
                self._wake_out.send(b"!")

    def read(self, timeout_ms: int) -> None:
        """Wait for sockets at most so long and serve what they bring."""
        with self._baton:
            if self._added or self._blocked:
                self._apply()
                timeout_ms = 0  # a new endpoint may have brought work already
            ready = self._poll.poll(timeout_ms)
            for fd, event in ready:
                self._serve(fd, event)

    @contextlib.contextmanager
    def attended(self) -> Iterator[None]:
        """The body takes long: the attendant reads meanwhile."""
        self._busy.set()
        try:
            yield
        finally:
            self._busy.clear()
            self.wake()

    def close(self) -> None:
        """Close every endpoint and end the attendant."""
        with self._changes:
            self._closed = True
        self._busy.set()
        self.wake()
        self._attendant.join(5)
        with self._baton:
            self._apply()
            for fd in list(self._endpoints):
                self._remove(fd)
            self._wake_in.close()
            self._wake_out.close()

    # with the baton -------------------------------------------------------------------------------------------------

    def _apply(self) -> None:
        with self._changes:
            added, self._added = self._added, []
            blocked, self._blocked = self._blocked, []
        for endpoint in added:
            self._endpoints[endpoint.fileno()] = endpoint
            self._poll.register(endpoint.fileno(), select.POLLIN)
            self._take(endpoint.fileno(), endpoint)  # something can have come with the handshake
        for endpoint in blocked:
            if self._endpoints.get(endpoint.fileno()) is endpoint:
                self._poll.modify(endpoint.fileno(), select.POLLIN | select.POLLOUT)

    def _serve(self, fd: int, event: int) -> None:
        if fd == self._wake_in.fileno():
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
            self._signalled = False
            return
        endpoint = self._endpoints[fd]
        if event & select.POLLOUT and not endpoint.on_writable():
            self._poll.modify(fd, select.POLLIN)
        if event & ~select.POLLOUT:
            self._take(fd, endpoint)

    def _take(self, fd: int, endpoint: Endpoint) -> None:
        if not endpoint.on_readable():
            self._remove(fd)

    def _remove(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._endpoints.pop(fd).close()

    # the attendant --------------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        while not self._closed:
            self._busy.wait()
            while self._busy.is_set() and not self._closed:
                self.read(IDLE_MS)
            self.wake()  # what was queued here must not wait until the thread's own wait is over
