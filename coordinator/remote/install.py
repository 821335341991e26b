"""Assign: a worker is told what to hold and serve, and is pushed the experts that it asks for.

Every wait has a deadline. Knows nothing of what the experts are for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Thread

import grpc

from titan.common.errors import WorkerBadReply, WorkerLost, WorkerTimeout
from titan.common.units import format_seconds
from titan.common.wire.messages import PART_BYTES
from titan.coordinator.remote.connection import Connection, from_rpc_error
from titan.coordinator.remote.share import Share
from titan.proto.titan.v1 import worker_pb2 as pb

# read_bytes(layer, expert): its components as they are on disk, one after another
ReadBytes = Callable[[int, int], bytearray]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an install is."""

    experts_done: int
    experts_total: int
    bytes_done: int
    bytes_total: int


def install(
    connection: Connection,
    share: Share,
    read_bytes: ReadBytes,
    idle_timeout_s: float,
    on_progress: Callable[[Progress], None],
    stopped: Callable[[], bool],
) -> Share:
    """Have a worker hold and serve exactly `share`; pushes the experts that it asks for.

    Returns the share as it is there: a worker that serves what it keeps of what it is sent may have no room for all.

    Raises:
        WorkerTimeout: no progress for `idle_timeout_s`.
        WorkerBadReply: its slot tables do not map what it was given, or it does not serve what it is to serve.
        WorkerLost, WorkerRefused, MemoryBudgetError: as the worker says.
    """
    name = connection.worker.name
    held: dict[int, frozenset[int]] = {}
    served: dict[int, frozenset[int]] = {}
    needed: Queue[list[tuple[int, int]] | None] = Queue()
    stream = connection.stub.Assign(_assign_messages(connection, share, read_bytes, needed))
    messages: Queue[pb.AssignProgress | grpc.RpcError | None] = Queue()
    reader = Thread(target=_drain_stream, args=(stream, messages), name=f"titan-assign-{name}", daemon=True)
    reader.start()
    installed = False
    waited_since = time.monotonic()
    try:
        while True:
            try:
                message = messages.get(timeout=0.25)
            except Empty:
                if stopped():
                    raise WorkerLost(f"installing on worker {name} was interrupted") from None
                if time.monotonic() - waited_since > idle_timeout_s:
                    raise WorkerTimeout(
                        f"worker {name} made no progress installing experts for {format_seconds(idle_timeout_s)}",
                        "look at its log; raise timeouts.assign_idle when its disk is that slow",
                    ) from None
                continue
            waited_since = time.monotonic()
            if stopped():
                raise WorkerLost(f"installing on worker {name} was interrupted")
            if isinstance(message, grpc.RpcError):
                raise from_rpc_error(message, name, "Assign")
            if message is None:
                break
            if message.needed:
                needed.put([(entry.layer, e) for entry in message.needed for e in entry.experts])
            on_progress(Progress(message.experts_done, message.experts_total, message.bytes_done, message.bytes_total))
            if message.installed:
                installed = True
                needed.put(None)
                held = {entry.layer: frozenset(entry.experts) for entry in message.held}
                served = {entry.layer: frozenset(entry.experts) for entry in message.serves}
        if not installed:
            raise WorkerBadReply(f"worker {name} ended Assign before everything was installed")
        _check_held(name, share.pinned, held, "its slot table lacks")
        if connection.hello.has_checkpoint:
            _check_held(name, {i: cache.experts for i, cache in share.caches.items()}, served, "it does not serve")
        return share.serving(served)
    finally:
        stream.cancel()
        needed.put(None)
        reader.join(timeout=5)


def _check_held(name: str, wanted: Mapping[int, Sequence[int]], held: Mapping[int, frozenset[int]], words: str) -> None:
    """What the worker says it has must be what it was given."""
    for layer, experts in wanted.items():
        absent = set(experts) - held.get(layer, frozenset())
        if absent:
            raise WorkerBadReply(
                f"worker {name} says it installed layer {layer}, but {words} experts {sorted(absent)[:8]}"
            )


def _assign_messages(
    connection: Connection,
    share: Share,
    read_bytes: ReadBytes,
    needed: Queue[list[tuple[int, int]] | None],
) -> Iterator[pb.AssignRequest]:
    yield pb.AssignRequest(
        assignment=pb.Assignment(
            session=connection.hello.session,
            residency=[pb.LayerExperts(layer=layer, experts=experts) for layer, experts in share.pinned.items()],
            caches=[pb.LayerCache(layer=i, slots=c.slots, experts=c.experts) for i, c in share.caches.items()],
        )
    )
    asked = {(layer, e) for layer, experts in share.pinned.items() for e in experts}
    if not connection.hello.has_checkpoint:  # it keeps what it is to read later
        asked |= {(layer, e) for layer, cache in share.caches.items() for e in cache.experts}
    for batch in iter(needed.get, None):
        for layer, expert in batch:
            if (layer, expert) not in asked:
                return  # not ours to give, or given before; the worker's Assign then fails by itself
            asked.remove((layer, expert))
            data = read_bytes(layer, expert)
            for offset in range(0, len(data), PART_BYTES):
                piece = bytes(data[offset : offset + PART_BYTES])
                yield pb.AssignRequest(part=pb.ExpertPart(layer=layer, expert=expert, offset=offset, data=piece))


def _drain_stream(stream: Iterator[pb.AssignProgress], messages: Queue) -> None:
    try:
        for message in stream:
            messages.put(message)
    except grpc.RpcError as error:
        messages.put(error)
    else:
        messages.put(None)
