"""What carries Execute to one worker: a small interface, so that the hot path does not know gRPC.

A transport belongs to one session. Replies arrive in an inbox that all workers share, so that one wait serves all.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from titan.common.wire.messages import ExecuteCall, ExecuteResult


@dataclass(frozen=True, slots=True)
class Arrival:
    """Something came from a worker: a reply to `request_id` (decoded when it is read), or the transport ended."""

    transport: Transport
    request_id: int | None
    payload: object  # the transport's own reply message, or a ClusterError


Inbox = SimpleQueue[Arrival]


class Transport(Protocol):
    """One session's way to a worker. `send` returns at once; every reply becomes an Arrival in the inbox."""

    def send(self, call: ExecuteCall) -> None:
        """Queue a call. After the transport has ended this does nothing: the end has been announced in the inbox."""

    def decode(self, arrival: Arrival, call: ExecuteCall) -> ExecuteResult:
        """The checked result of an arrival.

        Raises:
            ClusterError: the worker refused the call, or its answer is not what was asked for.
        """
        ...

    def close(self) -> None:
        """End the transport; nothing arrives from it afterwards that anyone waits for."""
