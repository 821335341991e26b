"""Who executes which expert of a layer, now: here from memory, on a worker, or here from the local SSD.

The plan says who holds what; the workers that are ready now decide what of it counts. What fails elsewhere is executed
here within the same layer. Runs on the engine's thread. Knows neither gRPC nor how workers come back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.errors import CheckpointError, StoreError, WorkerOverloaded
from titan.common.experts import ExpertLayer
from titan.common.prefetch.prefetcher import Prefetcher
from titan.coordinator.moe.account import Executed
from titan.coordinator.moe.choice import Owners, choose_owners
from titan.coordinator.moe.routing_counts import RoutingCounts
from titan.coordinator.moe.split import Site, SplitLayer, count_in_slots, require_owners
from titan.coordinator.moe.workers import Worker
from titan.coordinator.remote.exchange import Exchange, Failed
from titan.coordinator.remote.transport import Transport
from titan.placement.cost import Costs


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
        hedging: execute here, too, what a worker is unusually late with; a measurement wants the worker's own time.
        reduced: the workers return score-weighted sums: `execute` is to be given the scores.
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
        hedging: bool = True,
        *,
        reduced: bool = False,
    ) -> None:
        self.exchange = exchange or Exchange()
        self.costs = costs
        self.reduced = reduced
        self.executed = Executed()
        self.prefetcher: Prefetcher | None = None
        self.routing: RoutingCounts | None = None
        self._layers = layers
        self._workers = workers
        itemsize = COMPUTE_DTYPES[dtype][0].itemsize
        self._site = Site(self.exchange, self.executed, hidden_size, itemsize, dtype, verify, hedging)

    def execute(self, layer: int, x: mx.array, indices: mx.array, scores: mx.array | None = None) -> mx.array:
        """x: [..., D], indices: [..., K] -> outputs [..., K, D].

        With scores [..., K]: the sums over the experts of score times output, [..., D]; in float32 where a worker took
        part, as mlx-lm computes them where none did.
        """
        hidden, top_k = x.shape[-1], indices.shape[-1]
        weights = None if scores is None else scores.reshape(-1, top_k)
        y = self._execute(layer, x.reshape(-1, hidden), indices.reshape(-1, top_k), weights)
        return y.reshape(*(indices.shape if scores is None else indices.shape[:-1]), hidden)

    def _execute(self, layer: int, x: mx.array, indices: mx.array, scores: mx.array | None) -> mx.array:
        """x: [N, D], indices and scores: [N, K] -> outputs in the order of the pairs, or sums [N, D]."""
        local = self._layers[layer]
        prefetcher = self.prefetcher
        weights = None if scores is None else scores.astype(mx.float32)
        more = [] if prefetcher is None else [*prefetcher.lookout(layer, x)]
        self._synchronise(x, indices, more if weights is None else [*more, weights])
        experts = np.array(indices)
        if self.routing is not None:
            self.routing.saw(layer, experts)
        if self.exchange.overdue:
            self._set_aside(self.exchange.settle_overdue())
        owners = self._owners(layer, local, experts)
        y = None
        if not owners:
            try:
                y = self._execute_here(local, x, experts, scores)
            except (StoreError, CheckpointError) as error:
                owners = self._owners(layer, local, experts, at_any_cost=True)
                require_owners(experts, owners, local, error)
                self.executed.rescued += int(np.isin(experts, list(owners)).sum())
        if y is None:
            y = self._execute_split(layer, local, x, experts, None if weights is None else np.array(weights), owners)
        if prefetcher is not None:
            prefetcher.routed(layer, experts)
        return y

    def _execute_here(self, local: ExpertLayer, x: mx.array, experts: np.ndarray, scores: mx.array | None) -> mx.array:
        in_slots = count_in_slots(local, experts.reshape(-1))
        y = local.run_rows(x, experts)
        self.executed.at_home(experts.size, in_slots)
        return y if scores is None else (y * scores[..., None]).sum(axis=-2)

    def executed_at_home(self, pairs: int) -> None:
        self.executed.local += pairs

    def _synchronise(self, x: mx.array, indices: mx.array, more: Sequence[mx.array]) -> None:
        """Materialise what this layer needs, and with it everything lazy that earlier layers still read slots for."""
        pending = [layer for layer in self._layers.values() if layer.unevaluated is not None]
        mx.eval(x, indices, *more, *(layer.unevaluated for layer in pending))
        for layer in pending:
            layer.forget_unevaluated()

    def _owners(
        self,
        layer: int,
        local: ExpertLayer,
        experts: np.ndarray,
        without: Collection[Transport] = (),
        *,
        at_any_cost: bool = False,
    ) -> Owners:
        """Who executes those experts [N, K] that are not to be executed here; nobody of `without`.

        at_any_cost: of those in no slot here, all that anybody has.
        """
        ready = [(node, r) for node, w in enumerate(self._workers, 1) if (r := w.ready) is not None and r.has(layer)]
        if self.exchange.overdue:  # one that owes an answer gets no further call
            ready = [(node, r) for node, r in ready if not self.exchange.owes(r.transport)]
        if without:
            ready = [(node, r) for node, r in ready if r.transport not in without]
        costs = None if at_any_cost else self.costs
        return choose_owners(layer, experts, ready, local.table.slots, costs) if ready else {}

    def _execute_split(
        self,
        layer: int,
        local: ExpertLayer,
        x: mx.array,
        experts: np.ndarray,
        scores: np.ndarray | None,
        owners: Owners,
    ) -> mx.array:
        def others(lost: np.ndarray, gone: Collection[Transport]) -> Owners:
            return self._owners(layer, local, lost[:, None], gone)

        def anybody(lost: np.ndarray) -> Owners:
            return self._owners(layer, local, lost[:, None], at_any_cost=True)

        y, failed = SplitLayer(self._site, layer, local, x, experts, scores, others, anybody).run(owners)
        self._set_aside(failed)
        return y

    def _set_aside(self, failed: list[Failed]) -> None:
        """Stop using the sessions that failed, and those whose worker has said that it is leaving.

        A worker that says it has too much to do has not failed: it is asked again in the next layer.
        """
        errors = {id(f.outstanding.transport): f.error for f in failed if not isinstance(f.error, WorkerOverloaded)}
        for worker in self._workers:
            state = worker.ready
            if state is not None and (error := errors.get(id(state.transport)) or state.transport.leaving) is not None:
                worker.set_aside(state.transport, error)
