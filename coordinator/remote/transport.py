"""What carries Execute to one worker: a small interface, so that the hot path knows neither gRPC nor frames.

A transport belongs to one session and has one descriptor that becomes readable when something has come, so that one
poll on the engine's thread serves all workers. Its conformance suite is tests/coordinator/remote/test_conformance.py.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from titan.common.errors import ClusterError
from titan.common.wire.messages import ExecuteCall, ExecuteResult, Hint


class Arrival(NamedTuple):
    """A reply to `request_id`, not decoded yet; `payload` is the transport's own."""

    request_id: int
    payload: object


class Transport(Protocol):
    """One session's way to a worker. Used by one thread, except `close`.

    Attributes:
        name: "lane" or "grpc".
        worker: name of the worker, for errors.
        outstanding: calls that were sent and have not been answered.
        records: TLS records so far in the direction that had more, about: keys are good for a limited number.
        leaving: set once the worker has said that it shuts down: send nothing more, what was sent is still answered.
    """

    name: str
    worker: str
    leaving: ClusterError | None
    outstanding: int

    @property
    def records(self) -> int: ...

    def fileno(self) -> int:
        """To poll for reading, and for writing while `unsent`; -1 when closed."""
        ...

    @property
    def unsent(self) -> bool:
        """Whether part of a call waits for the socket to take more."""
        ...

    def send(self, call: ExecuteCall) -> None:
        """Begin to send a call; returns at once.

        Raises:
            ClusterError: the transport has ended.
        """

    def hint(self, hint: Hint) -> bool:
        """Send a hint if that is possible at once and delays no call; False when it was dropped. Never raises."""
        ...

    def flush(self) -> None:
        """The descriptor is writable: go on sending. Raises as `send` does."""

    def receive(self) -> list[Arrival]:
        """The replies that have come, none when there are none; `release` each.

        Raises:
            ClusterError: the transport has ended, after what came before its end has been returned.
        """
        ...

    def decode(self, arrival: Arrival, call: ExecuteCall) -> ExecuteResult:
        """The checked result of an arrival; its outputs are valid until `release`.

        Raises:
            ClusterError: the worker refused the call, or its answer is not what was asked for.
        """
        ...

    def release(self, arrival: Arrival) -> None:
        """The arrival's memory may be used again."""

    def close(self) -> None:
        """End the transport, from any thread. Whoever polls its descriptor is woken."""
