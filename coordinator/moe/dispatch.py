"""Who executes which expert of a layer, now: here from memory, on a worker, or here from the local SSD.

The plan says who holds what; the workers that are ready now decide what of it counts. What fails elsewhere is executed
here within the same layer. Runs on the engine's thread. Knows neither gRPC nor how workers come back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES, from_raw_bits, raw_bits
from titan.common.errors import ClusterError
from titan.common.experts import ExpertLayer
from titan.common.wire.messages import ExecuteCall, ExecuteResult, split_pairs
from titan.coordinator.remote.exchange import Exchange, Failed, Outstanding
from titan.coordinator.remote.transport import Transport

SORT_AT_PAIRS = 64


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
    """A live session: what it holds (layer -> experts), and how long an answer may take."""

    transport: Transport
    held: Mapping[int, frozenset[int]]
    execute_timeout_s: float
    pair_s: float  # measured seconds a (row, expert) pair (c_n)

    def deadline_s(self, pairs: int) -> float:
        """Base timeout plus ten times what the worker was measured to need."""
        return self.execute_timeout_s + 10 * self.pair_s * pairs


@dataclass(slots=True)
class Executed:
    """(row, expert) pairs executed so far, by where; `fallbacks` of them had been sent to a worker in vain."""

    local: int = 0
    ssd: int = 0
    fallbacks: int = 0
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
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertLayer],
        workers: Sequence[Worker],
        hidden_size: int,
        dtype: str,
        exchange: Exchange | None = None,
    ) -> None:
        self.exchange = exchange or Exchange()
        self.executed = Executed()
        self._layers = layers
        self._workers = workers
        self._hidden_size = hidden_size
        self._dtype = COMPUTE_DTYPES[dtype][1]
        self._itemsize = COMPUTE_DTYPES[dtype][0].itemsize

    def execute(self, layer: int, x: mx.array, indices: mx.array) -> mx.array:
        """x: [..., D], indices: [..., K] -> [..., K, D]."""
        local = self._layers[layer]
        x2 = x.reshape(-1, x.shape[-1])
        index2 = indices.reshape(-1, indices.shape[-1])
        self._synchronise(x2, index2)
        experts = np.array(index2)
        owners = self._owners(layer, local, experts)
        if owners is None:
            self._count_local(local, experts.reshape(-1))
            y = local.run_rows(x2, experts)
        else:
            y = self._execute_split(layer, local, x2, experts, owners)
        return y.reshape(*indices.shape, x.shape[-1])

    def executed_at_home(self, pairs: int) -> None:
        self.executed.local += pairs

    def _synchronise(self, x: mx.array, indices: mx.array) -> None:
        """Materialise what this layer needs, and with it everything lazy that earlier layers still read slots for."""
        pending = [layer for layer in self._layers.values() if layer.unevaluated is not None]
        mx.eval(x, indices, *(layer.unevaluated for layer in pending))
        for layer in pending:
            layer.forget_unevaluated()

    def _owners(
        self, layer: int, local: ExpertLayer, experts: np.ndarray
    ) -> dict[int, tuple[Worker, ReadyWorker]] | None:
        """Distinct expert -> worker, for those that are to be executed remotely; None when there are none."""
        ready = [(w, r) for w in self._workers if (r := w.ready) is not None and layer in r.held]
        if not ready:
            return None
        here = local.table.slots
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
        by_worker: dict[str, tuple[Worker, ReadyWorker, list[int]]] = {}
        for expert, (worker, state) in owners.items():
            by_worker.setdefault(worker.name, (worker, state, []))[2].append(expert)

        bits = raw_bits(x)
        remote_mask = np.zeros(flat.shape, bool)
        for worker, state, theirs in by_worker.values():
            mask = np.isin(flat, theirs)
            remote_mask |= mask
            self._send(layer, worker, state, bits, rows, flat, np.flatnonzero(mask), sort)
        try:
            mine = np.flatnonzero(~remote_mask)
            parts, positions = [], []
            if mine.size:
                self._count_local(local, flat[mine])
                parts.append(local.run_pairs(x, rows[mine], flat[mine], sort=sort))
                positions.append(mine)
                mx.async_eval(parts[0])
            outputs: list[tuple[np.ndarray, np.ndarray]] = []
            failed = self._collect(outputs)
        except BaseException:
            self.exchange.abandon()
            raise
        if outputs:
            received = [result for _, result in outputs]
            joined = received[0] if len(received) == 1 else np.concatenate(received)
            parts.append(from_raw_bits(joined, self._dtype))
            positions.extend(place for place, _ in outputs)
        if failed:
            again = np.concatenate([f.outstanding.positions for f in failed])
            self._set_aside(failed)
            self.executed.fallbacks += again.size
            self._count_local(local, flat[again])
            parts.append(local.run_pairs(x, rows[again], flat[again], sort=sort))
            positions.append(again)
        y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        order = np.argsort(np.concatenate(positions)).astype(np.uint32)
        if not np.array_equal(order, np.arange(order.size)):
            y = y[mx.array(order)]
        return y

    def _send(
        self,
        layer: int,
        worker: Worker,
        state: ReadyWorker,
        bits: np.ndarray,
        rows: np.ndarray,
        experts: np.ndarray,
        positions: np.ndarray,
        sort: bool,
    ) -> None:
        """Send a worker its pairs; each activation row travels once a request."""
        for part in split_pairs(positions.size, self._hidden_size, self._itemsize):
            chosen = positions[part]
            used, pair_rows = np.unique(rows[chosen], return_inverse=True)
            call = ExecuteCall(
                request_id=self.exchange.next_id(),
                layer=layer,
                activations=bits if used.size == bits.shape[0] else bits[used],
                pair_rows=pair_rows.astype(np.uint32),
                pair_experts=experts[chosen].astype(np.uint32, copy=False),
                sort=sort,
                deadline_s=state.deadline_s(positions.size),
            )
            self.exchange.send(worker.name, state.transport, call, chosen)

    def _collect(self, outputs: list[tuple[np.ndarray, np.ndarray]]) -> list[Failed]:
        start = time.perf_counter()

        def take(outstanding: Outstanding, result: ExecuteResult) -> None:
            outputs.append((outstanding.positions, result.outputs))
            remote = self.executed.remote
            remote[outstanding.worker] = remote.get(outstanding.worker, 0) + outstanding.positions.size

        failed = self.exchange.collect(take)
        self.executed.remote_layers += 1
        self.executed.wait_s += time.perf_counter() - start
        return failed

    def _set_aside(self, failed: list[Failed]) -> None:
        by_name = {worker.name: worker for worker in self._workers}
        for failure in failed:
            by_name[failure.outstanding.worker].set_aside(failure.outstanding.transport, failure.error)

    def _count_local(self, local: ExpertLayer, experts: np.ndarray) -> None:
        slots = local.table.slots
        here = sum(e in slots for e in experts.tolist())
        self.executed.local += here
        self.executed.ssd += experts.size - here
