"""Measuring a whole cluster: this machine, then each worker over each of its addresses, then all together.

Kept figures are used where there are any. Knows the cluster's surface; the measurements are in `local` and `remote`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.experts import ExpertLayer
from titan.common.log import get_logger
from titan.common.registry import Checkpoint
from titan.common.slots.buffers import LayerBuffers, slot_bytes
from titan.common.store import ExpertStore, ReaderPool
from titan.coordinator.calibration.figures import (
    figures_key,
    home_figures,
    keep_figures,
    load_figures,
    with_reads,
    with_sharing,
    worker_figures,
)
from titan.coordinator.calibration.local import Folding, LocalFigures, measure_local, scratch_layer
from titan.coordinator.calibration.reads import cache_to_measure, measure_reads
from titan.coordinator.calibration.remote import measure_remote, measure_together, quickest
from titan.coordinator.calibration.steps import DecodeSteps
from titan.coordinator.host.model import HostModel
from titan.coordinator.moe.dispatch import Dispatcher
from titan.coordinator.remote.exchange import Exchange
from titan.coordinator.remote.link import WorkerLink
from titan.coordinator.remote.share import Cache
from titan.placement import Node
from titan.placement.cost import Costs
from titan.placement.figures import Figures, HomeFigures, WorkerFigures

log = get_logger("coordinator.calibration")

TRIES = 2
RETURN_S = 10.0  # for a worker that failed meanwhile to be taken back


@dataclass(slots=True)
class _Measured:
    """What was found of the workers, by name; `experts` is what each holds for the measurement."""

    chosen: dict[str, WorkerFigures] = field(default_factory=dict)
    elsewhere: dict[str, tuple[WorkerFigures, ...]] = field(default_factory=dict)
    unreached: dict[str, tuple[str, ...]] = field(default_factory=dict)
    experts: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Calibration:
    """Measures once; on the engine's thread, with the host model loaded and not bound.

    Args:
        links: of the workers, greeted.
        wait_for: waits until a worker holds what it was assigned, or is away.
        folder: where figures are kept; None keeps none.
        report: told what is being measured.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        store: ExpertStore,
        readers: ReaderPool,
        model: HostModel,
        dtype: str,
        links: Sequence[WorkerLink],
        wait_for: Callable[[WorkerLink], None],
        folder: Path | None,
        report: Callable[[str], None],
    ) -> None:
        self._checkpoint, self._store, self._readers = checkpoint, store, readers
        self._model, self._dtype = model, dtype
        self._links, self._wait_for, self._folder, self._report = links, wait_for, folder, report
        shape = checkpoint.shape
        self._spec = shape.layers[0]
        self._row_bytes = shape.hidden_size * COMPUTE_DTYPES[dtype][0].itemsize

    def figures(self, *, again: bool) -> Figures:
        """Kept figures of this cluster, unless `again`; or new ones, kept from then on. Links prefer what they say."""
        shape = self._checkpoint.shape
        present = [link for link in self._links if link.status.address]
        told = {link.name: [*sorted(link.addresses), *(["reads"] if link.reads else [])] for link in present}
        key = figures_key(shape, self._dtype, told)
        kept = None if again else load_figures(self._folder, key)
        if kept is not None:
            for link in present:
                if link.name in kept.workers:
                    link.prefer(kept.workers[link.name].address)
            return kept
        started = time.monotonic()
        scratch = scratch_layer(self._checkpoint, self._store, self._readers, self._dtype)
        steps = DecodeSteps(self._model, {spec.index: scratch for spec in shape.layers})
        local = measure_local(self._checkpoint, self._store, self._readers, steps, scratch, self._dtype, self._report)
        home = home_figures(local, shape.top_k)
        found = _Measured()
        without_s = local.without.median_s
        for place, link in enumerate(present):
            self._measure_worker(found, link, place, steps, without_s, home)
        found.chosen.update(self._shared(found, steps, without_s, home, scratch))
        home = self._with_choice(found, steps, local, home, scratch)
        figures = Figures(key, home, found.chosen, found.elsewhere, found.unreached)
        keep_figures(self._folder, figures)
        log.info("measured", took_s=round(time.monotonic() - started, 1))
        return figures

    def _measure_worker(
        self, found: _Measured, link: WorkerLink, place: int, steps: DecodeSteps, without_s: float, home: HomeFigures
    ) -> None:
        """A worker over each of its addresses, with a few experts of the first MoE layer; it then prefers the best."""
        shape, spec = self._checkpoint.shape, self._spec
        if (link.memory_budget_bytes or 0) < shape.top_k * slot_bytes(spec, self._dtype):
            return
        buffers = LayerBuffers(spec, shape.top_k, self._dtype)
        empty = ExpertLayer(buffers, self._store.read_expert, None, self._readers)
        experts = tuple(sorted((place * shape.top_k + i) % shape.num_experts for i in range(shape.top_k)))
        cache = self._cache_to_measure(link, experts)
        link.assign({spec.index: experts}, cache)
        measured: list[WorkerFigures] = []
        dead: list[str] = []
        for address in link.addresses:
            self._report(f"calibrating: worker {link.name} at {address}")
            link.prefer(address)
            self._wait_for(link)
            remote = None
            for _ in range(TRIES):  # one late answer of a busy machine must not cost a worker its place
                if link.status.address != address:
                    break
                remote = measure_remote(steps, without_s, link, spec.index, experts, empty, shape, self._dtype)
                if remote is not None:
                    break
                link.wait(("ready", "closed"), time.monotonic() + RETURN_S)
            if remote is None:
                dead.append(address)
            else:
                measured.append(worker_figures(address, remote, home.sync_s, self._row_bytes, link.power_w))
        if dead:
            found.unreached[link.name] = tuple(dead)
        if not measured:
            log.warning("worker could not be measured: the plan leaves it out", worker=link.name)
            return
        pairs = max(1, shape.top_k // 2)
        best = min(measured, key=lambda f: f.layer_s(pairs, self._row_bytes))
        link.prefer(best.address)
        self._wait_for(link)
        reads = None
        for layer, asked in cache.items():
            self._report(f"calibrating: the disk of worker {link.name}")
            reads = measure_reads(link, layer, asked, shape, self._dtype)
            if reads is None:
                log.warning("a worker's disk could not be measured: the plan has it read nothing", worker=link.name)
        found.chosen[link.name], found.experts[link.name] = with_reads(best, reads), experts
        found.elsewhere[link.name] = tuple(with_reads(f, reads) for f in measured if f is not best)

    def _cache_to_measure(self, link: WorkerLink, experts: tuple[int, ...]) -> dict[int, Cache]:
        """A cache in the last MoE layer beside `experts` of the first, for a worker that reads and has room for it."""
        shape, last = self._checkpoint.shape, self._checkpoint.shape.layers[-1]
        left = (link.memory_budget_bytes or 0) - len(experts) * slot_bytes(self._spec, self._dtype)
        slots = min(shape.top_k, left // slot_bytes(last, self._dtype)) if link.reads else 0
        others = [e for e in range(shape.num_experts) if last is not self._spec or e not in experts]
        cache = cache_to_measure(others, slots)
        return {} if cache is None else {last.index: cache}

    def _shared(
        self, found: _Measured, steps: DecodeSteps, without_s: float, home: HomeFigures, scratch: ExpertLayer
    ) -> dict[str, WorkerFigures]:
        """The workers' figures with what sharing a layer among them and this machine costs."""
        shape, spec = self._checkpoint.shape, self._spec
        links = [link for link in self._links if link.name in found.chosen and link.ready is not None]
        if not links:
            return {}
        share = max(1, shape.top_k // (len(links) + 1))
        asked = {link.name: found.experts[link.name][:share] for link in links}
        away = {e for experts in asked.values() for e in experts}
        here = [e for e in scratch.table.slots if e not in away][:share]
        buffers = LayerBuffers(spec, max(1, len(here)), self._dtype)
        table = ExpertLayer(buffers, self._store.read_expert, None, self._readers)
        table.pin(here)
        self._report("calibrating: all together")
        everyone = [*here, *sorted(away)]
        taken = measure_together(steps, without_s, links, spec.index, everyone, table, shape, self._dtype)
        if taken is None:
            return {}
        pairs = {name: len(set(experts)) for name, experts in asked.items()}
        return with_sharing(found.chosen, pairs, home, len(here), self._row_bytes, taken.median_s)

    def _with_choice(
        self, found: _Measured, steps: DecodeSteps, local: LocalFigures, home: HomeFigures, scratch: ExpertLayer
    ) -> HomeFigures:
        """Node 0's figures with what choosing among the workers that are there takes in a layer."""
        links = [link for link in self._links if link.name in found.chosen and link.ready is not None]
        if not links:
            return home
        shape, spec = self._checkpoint.shape, self._spec
        nodes = [Node("home", 0, home.compute_s, home.compute_fixed_s, ssd_s=home.ssd_s, readers=home.readers)]
        for link in links:
            worker = found.chosen[link.name]
            nodes.append(Node(link.name, 0, worker.compute_s, round_trip_s=worker.round_trip_s))
        costs = Costs.of(nodes, self._row_bytes)
        choosing = Dispatcher({spec.index: scratch}, links, shape.hidden_size, self._dtype, Exchange(), costs)
        taken = quickest(steps, Folding(choosing, scratch, spec.index))
        more_s = (taken.median_s - local.asked.median_s) / steps.layers
        return replace(home, choice_s=max(0.0, more_s))
