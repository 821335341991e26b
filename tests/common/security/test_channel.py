"""A channel is bound to the certificate that was looked at.

Run: `.venv/bin/pytest tests/common/security/test_channel.py`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from fixtures.certificates import DEADLINE_S, make_cluster

from titan.common.errors import WorkerUnreachable
from titan.common.security import Credentials, Role, grpc_server_credentials
from titan.common.security.channel import describe, open_channel
from titan.common.security.revoke import revoke
from titan.proto.titan.v1 import trust_pb2 as pb
from titan.proto.titan.v1.trust_pb2_grpc import TrustServicer, add_TrustServicer_to_server


class _Named(TrustServicer):
    def __init__(self, device: str) -> None:
        self.device = device

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        return pb.DescribeReply(device=self.device)


@contextlib.contextmanager
def _server(credentials: Credentials, device: str) -> Iterator[int]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        add_TrustServicer_to_server(_Named(device), server)
        port = server.add_secure_port("127.0.0.1:0", grpc_server_credentials(credentials))
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait(DEADLINE_S)


@contextlib.contextmanager
def _switch(first: int, then: int) -> Iterator[str]:
    """An address whose first connection is carried to one port, and every later one to another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = iter([first])
        pipes: list[socket.socket] = []

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65_536):
                    target.sendall(data)
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        threads: list[threading.Thread] = []

        def accept() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                far = socket.create_connection(("127.0.0.1", next(ports, then)))
                pipes.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threads.append(threading.Thread(target=carry, args=pair))
                    threads[-1].start()

        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            threads[0].join(DEADLINE_S)
            for end in pipes:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(DEADLINE_S)
            for end in pipes:
                end.close()


def test_a_stolen_key_of_the_same_name_cannot_step_in_afterwards(tmp_path: Path) -> None:
    """The first connection, at which the list is asked, reaches the real worker; the next one does not."""
    cluster = make_cluster(tmp_path / "certs")
    stolen = cluster.member("mini")
    revoke(cluster.authority, "mini")
    real = cluster.member("mini")
    coordinator = cluster.member("coordinator", Role.COORDINATOR, [])
    with _server(real, "real") as honest, _server(stolen, "stolen") as thief:
        with (
            _switch(honest, honest) as address,
            open_channel("mini", address, coordinator, timeout_s=DEADLINE_S) as channel,
        ):
            assert channel.peer == real.identity
            assert describe(channel, timeout_s=DEADLINE_S).device == "real"
        with (
            _switch(honest, thief) as address,
            open_channel("mini", address, coordinator, timeout_s=DEADLINE_S) as channel,
            pytest.raises(WorkerUnreachable, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            describe(channel, timeout_s=DEADLINE_S)
        with pytest.raises(WorkerUnreachable, match="was revoked"):
            open_channel("mini", f"127.0.0.1:{thief}", coordinator, timeout_s=DEADLINE_S)
