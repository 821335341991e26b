"""A worker as dispatch sees it: a session that is ready or away. Knows neither gRPC nor how workers come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from titan.common.errors import ClusterError
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.transport import Transport


class Worker(Protocol):
    """One of hosts.yaml. `ready` is None while it is away."""

    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> ReadyWorker | None: ...

    def set_aside(self, transport: Transport, error: ClusterError) -> None:
        """Stop using this session; the worker is taken back, as a new one, when it answers again."""


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A live session: what it holds (layer -> experts), how long its answers take, what it reads when it is asked."""

    transport: Transport
    held: Mapping[int, frozenset[int]]
    times: ReplyTimes
    served: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def has(self, layer: int) -> bool:
        return layer in self.held or layer in self.served
