"""Assign: from what a worker holds to what its coordinators want it to hold, with progress. Knows no gRPC context."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence

import numpy as np

from titan.common.errors import DiskStalled, WorkerOverloaded
from titan.common.log import get_logger
from titan.common.units import format_bytes
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.worker.holdings import Holdings, LayerStep
from titan.worker.install import Progress, receive, unpack
from titan.worker.sessions import Session
from titan.worker.share import Share, read_share, union
from titan.worker.sources import Sources

log = get_logger("worker")

ASSIGN_LOCK_TIMEOUT_S = 30.0


def assign(
    holdings: Holdings,
    session: Session,
    others: Sequence[Session],
    assignment: pb.Assignment,
    parts: Iterator[pb.AssignRequest],
    sources: Sources,
) -> Iterator[pb.AssignProgress]:
    """Hold what `assignment` says, and what `others` have here.

    Args:
        others: sessions of other coordinators that are executing here.
        parts: the coordinator's stream after its first message.
        sources: where experts come from; what none of them has is asked of the coordinator.

    Raises:
        WorkerOverloaded: another coordinator's install takes too long to wait for.
        WorkerRefused, MemoryBudgetError, WireError: the assignment or its parts cannot be right.
    """
    if not holdings.installing.acquire(timeout=ASSIGN_LOCK_TIMEOUT_S):
        raise WorkerOverloaded("experts are being installed for another coordinator", "try later")
    try:
        wanted = read_share(assignment, holdings.shape)
        everybody = union([wanted, *(other.assigned for other in others)])
        progress = yield from _install(holdings, everybody, parts, sources)
        session.assigned = wanted
        log.info(
            "experts installed",
            coordinator=session.coordinator,
            experts=holdings.expert_count,
            resident=format_bytes(holdings.resident_bytes),
            read=format_bytes(progress.bytes_total),
        )
        held = [pb.LayerExperts(layer=layer, experts=sorted(holdings.held(layer))) for layer in wanted.layers]
        serves = [
            pb.LayerCache(layer=i, slots=holdings.cache_slots(i), experts=sorted(holdings.served(i)))
            for i in sorted(wanted.caches)
        ]
        yield progress.message(installed=True, held=held, serves=serves)
    finally:
        holdings.installing.release()


def _install(
    holdings: Holdings,
    wanted: Share,
    parts: Iterator[pb.AssignRequest],
    sources: Sources,
) -> Generator[pb.AssignProgress, None, Progress]:
    steps = holdings.plan(wanted)
    sizes = {step.layer: holdings.shape.layer(step.layer).expert_bytes for step in steps}
    served = _to_keep(holdings, wanted, sources)
    absent = {i: _absent(holdings, sources, i, experts) for i, experts in served.items()}
    progress = Progress(
        sum(len(step.missing) for step in steps) + sum(map(len, absent.values())),
        sum(len(s.missing) * sizes[s.layer] for s in steps)
        + sum(len(experts) * holdings.shape.layer(i).expert_bytes for i, experts in absent.items()),
    )
    yield progress.message()
    for step in steps:
        targets = holdings.begin(step)
        filled = stalled = False
        try:
            yield from _fill(holdings, step, targets, wanted, parts, sources, progress)
            filled = True
        except DiskStalled:
            stalled = True
            raise
        finally:  # also when the peer goes away and the generator is closed
            if filled:
                holdings.finish(step)
            else:
                holdings.abandon(step, written=stalled)
    for layer, experts in served.items():
        yield from _keep(holdings, sources, layer, absent[layer], served, parts, progress)
        holdings.serve(layer, experts.difference(_absent(holdings, sources, layer, experts)))
    return progress


def _to_keep(holdings: Holdings, wanted: Share, sources: Sources) -> dict[int, frozenset[int]]:
    """Experts that are to be served from what is kept here, as far as its bound goes; none with a checkpoint."""
    if sources.checkpoint is not None or sources.cache is None:
        return {}
    return sources.cache.affordable(holdings.shape, wanted.served)


def _absent(holdings: Holdings, sources: Sources, layer: int, experts: Collection[int]) -> list[int]:
    """Those of which nothing is kept here."""
    assert sources.cache is not None
    return [e for e in sorted(experts) if not sources.cache.has(holdings.shape, layer, e)]


def _keep(
    holdings: Holdings,
    sources: Sources,
    layer: int,
    absent: Sequence[int],
    served: Mapping[int, frozenset[int]],
    parts: Iterator[pb.AssignRequest],
    progress: Progress,
) -> Iterator[pb.AssignProgress]:
    """Have the coordinator send what is to be read from here later. Pinned experts' files make room for it."""
    if not absent:
        return
    assert sources.cache is not None
    spec = holdings.shape.layer(layer)
    yield progress.message(needed=[pb.LayerExperts(layer=layer, experts=absent)])
    for expert in absent:
        sources.cache.keep(holdings.shape, layer, expert, receive(spec, expert, parts), served)
        sources.installed.add("pushed", by=spec.expert_bytes)
        if progress.add(spec.expert_bytes):
            yield progress.message()


def _fill(
    holdings: Holdings,
    step: LayerStep,
    targets: Mapping[int, Sequence[np.ndarray]],
    wanted: Share,
    parts: Iterator[pb.AssignRequest],
    sources: Sources,
    progress: Progress,
) -> Iterator[pb.AssignProgress]:
    """Fill one layer's slots: what is at hand first, then what the coordinator has to send."""
    if not step.missing:
        return
    shape, spec = holdings.shape, holdings.shape.layer(step.layer)
    needed: list[int] = []

    def done(source: str) -> bool:
        sources.installed.add(source, by=spec.expert_bytes)
        return progress.add(spec.expert_bytes)

    for expert in step.missing:
        data = None
        if sources.checkpoint is not None:
            sources.checkpoint(step.layer, expert, targets[expert])
        elif sources.cache is not None and (data := sources.cache.read(shape, step.layer, expert)) is not None:
            unpack(spec, data, targets[expert])
        else:
            needed.append(expert)
            continue
        if done("checkpoint" if data is None else "cache"):
            yield progress.message()
    if not needed:
        return
    yield progress.message(needed=[pb.LayerExperts(layer=step.layer, experts=needed)])
    for expert in needed:
        data = receive(spec, expert, parts)
        unpack(spec, data, targets[expert])
        if sources.cache is not None:
            sources.cache.keep(shape, step.layer, expert, data, wanted.experts)
        if done("pushed"):
            yield progress.message()
