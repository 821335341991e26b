"""Who makes room at a crowded door. Run: .venv/bin/pytest tests/common/test_door.py"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from titan.common.door import Door


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(8)]
    yield made
    for pair in made:
        for sock in pair:
            sock.close()


def ended(peer: socket.socket) -> bool:
    peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return peer.recv(1) == b""
    return False


def test_whoever_crowds_the_door_makes_room(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    door = Door(4)
    hosts = ["10.0.0.1", "10.0.0.9", "10.0.0.9", "10.0.0.9"]
    for (here, _), host in zip(pairs, hosts, strict=False):
        assert door.enter(here, host)
    assert not door.enter(pairs[4][0], "10.0.0.2")
    assert [ended(peer) for _, peer in pairs[:5]] == [False, True, False, False, False]
    assert not door.enter(pairs[5][0], "10.0.0.9")
    assert [ended(peer) for _, peer in pairs[2:6]] == [True, False, False, False]
    assert len(door) == 4
    door.leave(pairs[0][0])
    door.leave(pairs[0][0])  # twice does no harm
    assert door.enter(pairs[6][0], "10.0.0.3")
    door.close()
    assert not ended(pairs[0][1])  # it had left
    assert all(ended(peer) for _, peer in pairs[3:7])


def test_an_ipv6_network_is_one_peer(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    door = Door(3)
    for (here, _), host in zip(pairs, ["::ffff:10.0.0.1", "fd00::1", "fd00::2"], strict=False):
        door.enter(here, host)
    door.enter(pairs[3][0], "fe80::1%en0")
    assert [ended(peer) for _, peer in pairs[:4]] == [False, True, False, False]
    door.close()


def test_a_connection_that_is_closed_already_is_no_trouble(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    door = Door(1)
    door.enter(pairs[0][0], "unix")
    pairs[0][0].close()
    assert not door.enter(pairs[1][0], "10.0.0.1")
    door.close()
