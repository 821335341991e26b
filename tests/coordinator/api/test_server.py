"""Binding, deadlines on writing and stopping. Run: `.venv/bin/pytest tests/coordinator/api/test_server.py`."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fixtures.generation import DEADLINE_S, wait_until
from starlette.types import ASGIApp, Receive, Scope, Send

from titan.common.errors import AddressInUse, ConfigError
from titan.coordinator.api import ApiServer, Limits

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    del scope, receive
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


@contextmanager
def serving(app: ASGIApp, **limits: float) -> Iterator[tuple[ApiServer, threading.Thread]]:
    server = ApiServer(app, "127.0.0.1", 0, limits=Limits(**limits))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server to listen")
        yield server, thread
    finally:
        server.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def connect(server: ApiServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)


def test_a_taken_port_is_known_at_once() -> None:
    first = ApiServer(hello, "127.0.0.1", 0)
    try:
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{first.port} is in use"):
            ApiServer(hello, "127.0.0.1", first.port)
    finally:
        first.close()
    ApiServer(hello, "127.0.0.1", first.port).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_ours_is_a_sentence(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:0"):
        ApiServer(hello, host, 0)


def test_ipv6_loopback_is_served() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = ApiServer(hello, "::1", 0)
    except ConfigError as error:
        pytest.skip(str(error))
    assert server.address == f"[::1]:{server.port}"
    server.close()


def test_a_client_that_does_not_read_is_cut_off() -> None:
    outcome: list[str] = []

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        outcome.append((await gone)["type"])

    with serving(endless, stalled_write_s=0.2) as (server, _), connect(server) as client:
        client.sendall(GET)
        wait_until(lambda: bool(outcome), "the server to give up on its client")
    assert outcome == ["http.disconnect"]


def test_stopping_lets_an_answer_finish() -> None:
    started, go_on = threading.Event(), threading.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        started.set()
        await asyncio.to_thread(go_on.wait, DEADLINE_S)
        await send({"type": "http.response.body", "body": b"the end"})

    with serving(slow) as (server, _), connect(server) as client:
        client.sendall(GET)
        wait_until(started.is_set, "the answer to begin")
        server.stop()

        def refused() -> bool:
            try:
                connect(server).close()
            except ConnectionError:
                return True
            return False

        wait_until(refused, "the server to stop listening")
        go_on.set()
        received = b""
        while data := client.recv(4096):
            received += data
    assert b"the end" in received


def test_stopping_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    cancelled: list[bool] = []
    started = threading.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with serving(endless, shutdown_s=1) as (server, thread), connect(server) as client:
        client.sendall(GET)
        wait_until(started.is_set, "the answer to begin")
        server.stop()
        wait_until(lambda: not thread.is_alive(), "the server to stop")
    assert cancelled == [True]
    assert "graceful shutdown exceeded" in caplog.text


PROGRAM = """
import sys
from titan.coordinator.api import ApiServer
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})
server = ApiServer(app, "127.0.0.1", 0)
sys.stdout.write(f"{server.port}\\n"); sys.stdout.flush()
server.run()
sys.stdout.write(f"ended by {server.received_signal}\\n")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_run_and_the_program_goes_on(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
            client.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert b"200" in client.recv(4096)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=DEADLINE_S)
    assert rest == f"ended by {number.value}\n"
    assert process.returncode == 0
