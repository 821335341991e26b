"""Who executes which expert of a layer, now: here from memory, on a worker, or here from the local SSD.

The plan says who holds what; the workers that are ready now decide what of it counts. What fails elsewhere is executed
here within the same layer. Runs on the engine's thread. Knows neither gRPC nor how workers come back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES, from_raw_bits, raw_bits
from titan.common.errors import ClusterError, TitanError, WorkerBadReply, WorkerOverloaded
from titan.common.execution import SORT_AT_PAIRS
from titan.common.experts import ExpertLayer
from titan.common.log import get_logger
from titan.common.prefetch.prefetcher import Prefetcher
from titan.common.wire.messages import ExecuteCall, ExecuteResult, split_pairs
from titan.coordinator.moe.choice import choose_nodes
from titan.coordinator.moe.pairs import divide, join, same_outputs, used_rows
from titan.coordinator.remote.exchange import Answered, Exchange, Failed, Hedge, Outstanding
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.coordinator.remote.transport import Transport
from titan.placement.cost import Costs

log = get_logger("coordinator.dispatch")

VERIFIED_PAIRS = 16  # of an answer that is looked at


class Worker(Protocol):
    """A worker as dispatch sees it. `ready` is None while it is away."""

    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> ReadyWorker | None: ...

    def set_aside(self, transport: Transport, error: ClusterError) -> None:
        """Stop using this session; the worker is taken back, as a new one, when it answers again."""


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A live session: what it holds (layer -> experts), and how long its answers take."""

    transport: Transport
    held: Mapping[int, frozenset[int]]
    times: ReplyTimes


@dataclass(slots=True)
class Executed:
    """(row, expert) pairs executed so far, by where; `fallbacks` of the local ones had been sent to a worker in vain.

    `hedged` were executed here because a worker took unusually long; they count neither as local nor as remote.
    """

    local: int = 0
    ssd: int = 0
    fallbacks: int = 0
    hedged: int = 0
    verified: int = 0  # answers that were computed here again
    remote: dict[str, int] = field(default_factory=dict)
    remote_layers: int = 0
    wait_s: float = 0.0


class Dispatcher:
    """Executes layers whose experts are not all at home.

    Args:
        layers: local experts by the model's layer number.
        workers: in the plan's order of preference.
        hidden_size: D.
        dtype: compute dtype, also that of the wire.
        exchange: whose inbox the workers' transports fill.
        costs: measured figures of this node and the workers, in that order; with them the cheapest executor is chosen,
            without them whoever holds an expert.
        verify: share of the answers that are computed here again and compared.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertLayer],
        workers: Sequence[Worker],
        hidden_size: int,
        dtype: str,
        exchange: Exchange | None = None,
        costs: Costs | None = None,
        verify: float = 0.0,
    ) -> None:
        self.exchange = exchange or Exchange()
        self.costs = costs
        self._verify = verify
        self._random = random.Random()
        self.executed = Executed()
        self.prefetcher: Prefetcher | None = None
        self._layers = layers
        self._workers = workers
        self._hidden_size = hidden_size
        self._dtype_name = dtype
        self._dtype = COMPUTE_DTYPES[dtype][1]
        self._itemsize = COMPUTE_DTYPES[dtype][0].itemsize

    def execute(self, layer: int, x: mx.array, indices: mx.array) -> mx.array:
        """x: [..., D], indices: [..., K] -> [..., K, D]."""
        local = self._layers[layer]
        x2 = x.reshape(-1, x.shape[-1])
        index2 = indices.reshape(-1, indices.shape[-1])
        prefetcher = self.prefetcher
        self._synchronise(x2, index2, () if prefetcher is None else prefetcher.lookout(layer, x2))
        experts = np.array(index2)
        if self.exchange.overdue:
            self._set_aside(self.exchange.settle_overdue())
        owners = self._owners(layer, local, experts)
        if owners is None:
            self._count_local(local, experts.reshape(-1))
            y = local.run_rows(x2, experts)
        else:
            y = self._execute_split(layer, local, x2, experts, owners)
        if prefetcher is not None:
            prefetcher.routed(layer, experts)
        return y.reshape(*indices.shape, x.shape[-1])

    def executed_at_home(self, pairs: int) -> None:
        self.executed.local += pairs

    def absent(self, layer: int, num_experts: int) -> list[int]:
        """Experts of a layer that a prompt would have to read here: in no slot, and with no worker that is ready."""
        local = self._layers[layer]
        if local.whole:
            return []
        held = [r.held[layer] for w in self._workers if (r := w.ready) is not None and layer in r.held]
        return [e for e in range(num_experts) if e not in local.table.slots and not any(e in h for h in held)]

    def _synchronise(self, x: mx.array, indices: mx.array, more: Sequence[mx.array]) -> None:
        """Materialise what this layer needs, and with it everything lazy that earlier layers still read slots for."""
        pending = [layer for layer in self._layers.values() if layer.unevaluated is not None]
        mx.eval(x, indices, *more, *(layer.unevaluated for layer in pending))
        for layer in pending:
            layer.forget_unevaluated()

    def _owners(
        self, layer: int, local: ExpertLayer, experts: np.ndarray
    ) -> dict[int, tuple[Worker, ReadyWorker]] | None:
        """Distinct expert -> worker, for those that are to be executed remotely; None when there are none."""
        ready = [(w, r) for w in self._workers if (r := w.ready) is not None and layer in r.held]
        if self.exchange.overdue:  # one that owes an answer gets no further call
            ready = [(w, r) for w, r in ready if not self.exchange.owes(r.transport)]
        if not ready:
            return None
        here = local.table.slots
        if self.costs is not None:
            places = {id(worker): node for node, worker in enumerate(self._workers, start=1)}
            by_node = {places[id(w)]: (w, r) for w, r in ready}
            held = [(node, r.held[layer]) for node, (_, r) in by_node.items()]
            chosen = choose_nodes(experts, held, here, self.costs)
            return {e: by_node[node] for e, node in chosen.items()} or None
        owners = {}
        for expert in set(experts.reshape(-1).tolist()):
            if expert in here:
                continue
            for worker, state in ready:
                if expert in state.held[layer]:
                    owners[expert] = (worker, state)
                    break
        return owners or None

    def _execute_split(
        self,
        layer: int,
        local: ExpertLayer,
        x: mx.array,
        experts: np.ndarray,
        owners: dict[int, tuple[Worker, ReadyWorker]],
    ) -> mx.array:
        flat = experts.reshape(-1)
        rows = np.repeat(np.arange(experts.shape[0], dtype=np.uint32), experts.shape[1])
        sort = flat.size >= SORT_AT_PAIRS
        senders = list({worker.name: state for worker, state in owners.values()}.values())
        numbers = {id(state): number for number, state in enumerate(senders)}
        *theirs, mine = divide(flat, {e: numbers[id(state)] for e, (_, state) in owners.items()}, len(senders))
        bits = raw_bits(x)
        for state, places in zip(senders, theirs, strict=True):
            self._send(layer, local, state, bits, rows, flat, places, sort)
        parts: list[mx.array] = []
        positions: list[np.ndarray] = []

        def here(places: np.ndarray) -> None:
            parts.append(local.run_pairs(x, rows[places], flat[places], sort=sort))
            positions.append(places)

        def hedge(outstanding: Outstanding, answered: Answered) -> bool:
            """Execute a call's pairs here, expert by expert, unless the answer comes before the last one."""
            places = outstanding.positions
            groups = [places[flat[places] == e] for e in dict.fromkeys(flat[places].tolist())]
            outputs = []
            for group in groups:
                if answered():
                    return False
                try:
                    outputs.append(local.run_pairs(x, rows[group], flat[group], sort=sort))
                except TitanError as error:  # the answer may still come: wait for it
                    log.warning(f"executing here instead of waiting failed: {error}", worker=outstanding.worker)
                    return False
            parts.extend(outputs)
            positions.extend(groups)
            self.executed.hedged += places.size
            return True

        def agrees(places: np.ndarray, theirs: np.ndarray) -> bool:
            """Whether this machine gets the same for some of an answer's pairs."""
            some = places[:VERIFIED_PAIRS]
            try:
                mine = local.run_pairs(x, rows[some], flat[some], sort=sort)
            except TitanError as error:
                log.warning(f"a worker's answer could not be checked: {error}")
                return True
            return same_outputs(raw_bits(mine), theirs[: some.size], self._dtype_name)

        try:
            if mine.size:
                self._count_local(local, flat[mine])
                here(mine)
                mx.async_eval(parts[0])
            outputs = np.empty((flat.size - mine.size, x.shape[1]), bits.dtype)
            answered, failed = self._collect(outputs, hedge, agrees)
        except BaseException:
            self.exchange.abandon()
            raise
        if answered:
            positions.extend(answered)
            parts.append(from_raw_bits(outputs[: sum(p.size for p in answered)], self._dtype))
        self._set_aside(failed)
        if lost := [f.outstanding.positions for f in failed if not f.hedged]:
            again = np.concatenate(lost)
            self.executed.fallbacks += again.size
            self._count_local(local, flat[again])
            here(again)
        return join(parts, positions, flat.size)

    def _send(
        self,
        layer: int,
        local: ExpertLayer,
        state: ReadyWorker,
        bits: np.ndarray,
        rows: np.ndarray,
        experts: np.ndarray,
        positions: np.ndarray,
        sort: bool,
    ) -> None:
        """Send a worker its pairs; each activation row travels once a request."""
        deadline_s = state.times.deadline_s(positions.size)
        slices = split_pairs(positions.size, self._hidden_size, self._itemsize)
        hedge_s = None
        if len(slices) == 1:
            hedge_s = state.times.hedge_s(positions.size, _local_s(local, experts[positions]), deadline_s)
        for part in slices:
            chosen = positions[part]
            activations, pair_rows = used_rows(bits, rows[chosen])
            call = ExecuteCall(
                request_id=self.exchange.next_id(),
                layer=layer,
                activations=activations,
                pair_rows=pair_rows,
                pair_experts=experts[chosen].astype(np.uint32, copy=False),
                sort=sort,
                deadline_s=deadline_s,
            )
            self.exchange.send(state.transport, call, chosen, state.times, hedge_s)

    def _collect(
        self, outputs: np.ndarray, hedge: Hedge, agrees: Callable[[np.ndarray, np.ndarray], bool]
    ) -> tuple[list[np.ndarray], list[Failed]]:
        """Put results into `outputs` one behind the other; returns their pairs' positions, and what failed.

        A result that is looked at and does not agree with this machine's own counts as failed.
        """
        start = time.perf_counter()
        answered: list[np.ndarray] = []
        rejected: list[Failed] = []
        filled = 0

        def take(outstanding: Outstanding, result: ExecuteResult) -> None:
            nonlocal filled
            positions = outstanding.positions
            if self._verify and self._random.random() < self._verify:
                self.executed.verified += 1
                if not agrees(positions, result.outputs):
                    rejected.append(Failed(outstanding, _disagrees(outstanding)))
                    return
            outputs[filled : filled + positions.size] = result.outputs
            filled += positions.size
            answered.append(positions)
            remote = self.executed.remote
            remote[outstanding.worker] = remote.get(outstanding.worker, 0) + positions.size

        failed = self.exchange.collect(take, hedge)
        self.executed.remote_layers += 1
        self.executed.wait_s += time.perf_counter() - start
        return answered, failed + rejected

    def _set_aside(self, failed: list[Failed]) -> None:
        """Stop using the sessions that failed, and those whose worker has said that it is leaving.

        A worker that says it has too much to do has not failed: it is asked again in the next layer.
        """
        errors = {id(f.outstanding.transport): f.error for f in failed if not isinstance(f.error, WorkerOverloaded)}
        for worker in self._workers:
            state = worker.ready
            if state is not None and (error := errors.get(id(state.transport)) or state.transport.leaving) is not None:
                worker.set_aside(state.transport, error)

    def _count_local(self, local: ExpertLayer, experts: np.ndarray) -> None:
        slots = local.table.slots
        here = sum(e in slots for e in experts.tolist())
        self.executed.local += here
        self.executed.ssd += experts.size - here


def _disagrees(outstanding: Outstanding) -> WorkerBadReply:
    return WorkerBadReply(
        f"worker {outstanding.worker} computed something else than this machine in layer {outstanding.call.layer}",
        "its memory or its copy of the checkpoint is damaged: restart it, and check its hardware if that repeats",
    )


def _local_s(local: ExpertLayer, experts: np.ndarray) -> float:
    """What executing these experts here would take: reading those that are not in a slot, at this layer's own rate."""
    counts = local.table.counts
    missing = sum(e not in local.table.slots for e in set(experts.tolist()))
    return missing * counts.stall_s / counts.loads if counts.loads else float("inf")
