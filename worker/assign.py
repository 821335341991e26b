"""Assign: from what a worker holds to what its coordinators want it to hold, with progress. Knows no gRPC context."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence

from titan.common.errors import WorkerOverloaded
from titan.common.experts import Fill
from titan.common.log import get_logger
from titan.common.metrics import Tally
from titan.common.units import format_bytes
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.worker.holdings import Holdings
from titan.worker.install import Progress, pushed_fill
from titan.worker.sessions import Session

log = get_logger("worker")

ASSIGN_LOCK_TIMEOUT_S = 30.0
PROGRESS_EVERY_S = 0.2


def assign(
    holdings: Holdings,
    session: Session,
    others: Sequence[Session],
    assignment: pb.Assignment,
    parts: Iterator[pb.AssignRequest],
    own_fill: Fill | None,
    installed: Tally,
) -> Iterator[pb.AssignProgress]:
    """Hold what `assignment` says, and what `others` have here.

    Args:
        others: sessions of other coordinators that are executing here.
        parts: the coordinator's stream after its first message.
        own_fill: reads experts from the worker's own checkpoint; None when they are pushed.
        installed: counts bytes by where they came from.

    Raises:
        WorkerOverloaded: another coordinator's install takes too long to wait for.
        WorkerRefused, MemoryBudgetError, WireError: the assignment or its parts cannot be right.
    """
    if not holdings.installing.acquire(timeout=ASSIGN_LOCK_TIMEOUT_S):
        raise WorkerOverloaded("experts are being installed for another coordinator", "try later")
    try:
        wanted: dict[int, frozenset[int]] = {}
        for entry in assignment.residency:
            wanted[entry.layer] = wanted.get(entry.layer, frozenset()) | frozenset(entry.experts)
        holdings.check(wanted)
        union = dict(wanted)
        for other in others:
            for layer, experts in other.assigned.items():
                union[layer] = union.get(layer, frozenset()) | experts
        progress = yield from _install(holdings, union, parts, own_fill, installed)
        session.assigned = wanted
        log.info(
            "experts installed",
            coordinator=session.coordinator,
            experts=holdings.expert_count,
            resident=format_bytes(holdings.resident_bytes),
            read=format_bytes(progress.bytes_total),
        )
        held = [pb.LayerExperts(layer=layer, experts=sorted(holdings.held(layer))) for layer in sorted(wanted)]
        yield progress.message(installed=True, held=held)
    finally:
        holdings.installing.release()


def _install(
    holdings: Holdings,
    wanted: dict[int, frozenset[int]],
    parts: Iterator[pb.AssignRequest],
    own_fill: Fill | None,
    installed: Tally,
) -> Generator[pb.AssignProgress, None, Progress]:
    steps = holdings.plan(wanted)
    sizes = {step.layer: holdings.shape.layer(step.layer).expert_bytes for step in steps}
    progress = Progress(sum(len(step.missing) for step in steps), sum(len(s.missing) * sizes[s.layer] for s in steps))
    needed = []
    if own_fill is None:
        needed = [pb.LayerExperts(layer=s.layer, experts=s.missing) for s in steps if s.missing]
    yield progress.message(needed=needed)
    fill = own_fill if own_fill is not None else pushed_fill(holdings.shape, parts)
    source = "pushed" if own_fill is None else "checkpoint"
    last = time.monotonic()
    for step in steps:
        targets = holdings.begin(step)
        filled = False
        try:
            for expert in step.missing:
                fill(step.layer, expert, targets[expert])
                progress.add(sizes[step.layer])
                installed.add(source, by=sizes[step.layer])
                if time.monotonic() - last > PROGRESS_EVERY_S:
                    last = time.monotonic()
                    yield progress.message()
            filled = True
        finally:  # also when the peer goes away and the generator is closed
            if filled:
                holdings.finish(step)
            else:
                holdings.abandon(step)
    return progress
