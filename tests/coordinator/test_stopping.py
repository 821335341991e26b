"""Ctrl-C as a wish to stop waiting: nothing but the wait is interrupted, and the wait always is."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from titan.coordinator.stopping import Stoppable, handled_elsewhere

DEADLINE_S = 20.0


def received(peer: socket.socket) -> Iterator[bytes]:
    while True:
        yield peer.recv(1)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A peer that never says anything."""
    near, far = socket.socketpair()
    near.settimeout(DEADLINE_S)
    with near, far:
        yield near


def test_an_item_that_has_come_is_finished_first() -> None:
    seen = []
    before = signal.getsignal(signal.SIGINT)
    with Stoppable() as stoppable:
        for item in stoppable.items(iter(range(9))):
            signal.raise_signal(signal.SIGINT)
            seen.append(item)
        signal.raise_signal(signal.SIGINT)  # while it ends
    assert seen == [0]
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_before_the_first_item(silent: socket.socket) -> None:
    with Stoppable() as stoppable:
        signal.raise_signal(signal.SIGINT)
        assert list(stoppable.items(received(silent))) == []


def test_a_signal_that_another_thread_took_ends_the_wait(silent: socket.socket) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(DEADLINE_S,))
    thread.start()
    assert thread.ident is not None

    def waited() -> Iterator[bytes]:
        signal.pthread_kill(thread.ident or 0, signal.SIGINT)  # sets Python's flag, interrupts nothing here
        yield from received(silent)

    with Stoppable() as stoppable:
        assert list(stoppable.items(waited())) == []
    done.set()
    thread.join(DEADLINE_S)


def test_threads_started_meanwhile_leave_signals_to_the_main_thread() -> None:
    masks = []
    with handled_elsewhere():
        thread = threading.Thread(target=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        thread.start()
        thread.join(DEADLINE_S)
    assert signal.SIGINT in masks[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_errors_and_ends_pass() -> None:
    with Stoppable() as stoppable:
        assert list(stoppable.items(iter("ab"))) == ["a", "b"]
    with pytest.raises(ZeroDivisionError), Stoppable() as stoppable:
        list(stoppable.items(1 // n for n in (1, 0)))
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
