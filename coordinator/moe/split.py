"""One layer executed by this machine and by workers together: asked, collected, what failed tried elsewhere or here.

A call that fails is sent once more, to another worker that holds its experts, if the time that the first had was not
over; what is left is executed here. What cannot be read here is executed by a worker that has it. Knows sessions and
pairs; not how owners are chosen, nor how parts are joined.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from titan.common.arrays import raw_bits
from titan.common.errors import CheckpointError, StoreError, TitanError, WorkerBadReply
from titan.common.execution import SORT_AT_PAIRS
from titan.common.experts import ExpertLayer
from titan.common.log import get_logger
from titan.common.wire.messages import ExecuteCall, ExecuteResult, split_pairs
from titan.coordinator.moe.account import Executed
from titan.coordinator.moe.choice import Owners
from titan.coordinator.moe.outputs import PairOutputs, RowSums
from titan.coordinator.moe.pairs import divide, used_rows
from titan.coordinator.moe.workers import ReadyWorker
from titan.coordinator.remote.exchange import Answered, Exchange, Failed, Outstanding
from titan.coordinator.remote.transport import Transport

log = get_logger("coordinator.dispatch")

# others(experts [P], transports that failed) -> who else executes which of them
Others = Callable[[np.ndarray, Collection[Transport]], Owners]
# anybody(experts [P]) -> who executes which of them, whatever that costs
Anybody = Callable[[np.ndarray], Owners]


@dataclass(frozen=True, slots=True)
class Site:
    """What is the same in every layer.

    Args:
        hidden_size, dtype: D and the compute dtype, also that of the wire.
        verify: share of the answers that are computed here again and compared.
    """

    exchange: Exchange
    executed: Executed
    hidden_size: int
    itemsize: int
    dtype: str
    verify: float = 0.0
    hedging: bool = True
    draw: Callable[[], float] = field(default=random.random)


class SplitLayer:
    """One execution of one layer; used once.

    Args:
        layer: the model's layer number.
        local: its experts here.
        x: [N, D] activations, evaluated.
        experts: [N, K] the router's choice.
        scores: [N, K] of float32: its weighted sums are wanted instead of single outputs.
        others: asked when a call has failed.
        anybody: asked when the disk here has failed.
    """

    def __init__(
        self,
        site: Site,
        layer: int,
        local: ExpertLayer,
        x: mx.array,
        experts: np.ndarray,
        scores: np.ndarray | None,
        others: Others,
        anybody: Anybody,
    ) -> None:
        self._site, self._layer, self._local, self._x = site, layer, local, x
        self._others, self._anybody = others, anybody
        self._flat = experts.reshape(-1)
        self._scores = None if scores is None else scores.reshape(-1)
        self._rows = np.repeat(np.arange(experts.shape[0], dtype=np.uint32), experts.shape[1])
        self._sort = self._flat.size >= SORT_AT_PAIRS
        self._bits = raw_bits(x)
        self._until = 0.0  # time.monotonic() up to which answers may be waited for
        self._retries: set[int] = set()
        self._gone: list[Transport] = []
        self._here: list[np.ndarray] = []

    def run(self, owners: Owners) -> tuple[mx.array, list[Failed]]:
        """[P, D] in the order of the pairs, or sums [N, D] in float32; and the calls that failed on the way."""
        exchange, executed = self._site.exchange, self._site.executed
        mine = self._send_all(np.arange(self._flat.size), owners)
        self._outputs = self._collector(self._flat.size - mine.size)
        try:
            if mine.size:
                self._begin_here(mine)
            started = time.perf_counter()
            failed = exchange.collect(self._take, self._hedge, self._retry)
            executed.remote_layers += 1
            executed.wait_s += time.perf_counter() - started
        except BaseException:
            exchange.abandon()
            raise
        if self._here:
            again = np.concatenate(self._here)
            executed.fallbacks += again.size
            self._execute_here(again)
        return self._outputs.joined(), failed

    def _collector(self, remote_pairs: int) -> PairOutputs | RowSums:
        site = self._site
        if self._scores is not None:
            return RowSums(self._rows, self._scores, self._x.shape[0], site.dtype)
        return PairOutputs(self._flat.size, remote_pairs, site.hidden_size, site.dtype)

    def _send_all(self, positions: np.ndarray, owners: Owners, until: float | None = None) -> np.ndarray:
        """Send pairs to their owners; returns the positions of those that are to be executed here.

        Args:
            until: these have failed before: an answer must come by then (time.monotonic()).
        """
        senders = list({id(state): state for state in owners.values()}.values())
        numbers = {id(state): number for number, state in enumerate(senders)}
        experts = self._flat[positions]
        *theirs, mine = divide(experts, {e: numbers[id(state)] for e, state in owners.items()}, len(senders))
        here = [positions[mine]]
        for state, places in zip(senders, theirs, strict=True):
            if until is None or until - time.monotonic() > state.times.usual_s(places.size):
                self._send(state, positions[places], until)
            else:
                here.append(positions[places])
        return here[0] if len(here) == 1 else np.concatenate(here)

    def _send(self, state: ReadyWorker, positions: np.ndarray, until: float | None) -> None:
        """Send a worker its pairs; each activation row travels once a request."""
        site, times = self._site, state.times
        deadline_s = times.deadline_s(positions.size)
        now = time.monotonic()
        hedge_s = None
        slices = split_pairs(positions.size, site.hidden_size, site.itemsize)
        if until is not None:
            deadline_s = min(deadline_s, until - now)
            site.executed.retried += positions.size
        else:
            self._until = max(self._until, now + times.ceiling_s(positions.size))
            if site.hedging and len(slices) == 1:
                local_s = _local_s(self._local, self._flat[positions])
                hedge_s = times.hedge_s(positions.size, local_s, deadline_s)
        for part in slices:
            chosen = positions[part]
            activations, pair_rows = used_rows(self._bits, self._rows[chosen])
            call = ExecuteCall(
                request_id=site.exchange.next_id(),
                layer=self._layer,
                activations=activations,
                pair_rows=pair_rows,
                pair_experts=self._flat[chosen].astype(np.uint32, copy=False),
                sort=self._sort,
                deadline_s=deadline_s,
                scores=None if self._scores is None else self._scores[chosen],
            )
            if until is not None:
                self._retries.add(call.request_id)
            site.exchange.send(state.transport, call, chosen, times, hedge_s)

    # while the answers are collected --------------------------------------------------------------------------------

    def _take(self, outstanding: Outstanding, result: ExecuteResult) -> None:
        positions, executed = outstanding.positions, self._site.executed
        if self._site.verify and self._site.draw() < self._site.verify:
            executed.verified += 1
            self._verify(outstanding, result)
        outstanding.times.record_load(self._layer, outstanding.call.pair_experts, result.load_us / 1e6)
        self._outputs.add_answer(positions, result.outputs)
        executed.remote[outstanding.worker] = executed.remote.get(outstanding.worker, 0) + positions.size

    def _verify(self, outstanding: Outstanding, result: ExecuteResult) -> None:
        """Raises WorkerBadReply: this machine gets something else for some of an answer's pairs."""
        some = self._outputs.to_verify(outstanding.positions)
        try:
            mine = self._compute(some)
        except TitanError as error:
            log.warning(f"a worker's answer could not be checked: {error}")
            return
        if not self._outputs.agrees(some, mine, result.outputs):
            raise WorkerBadReply(
                f"worker {outstanding.worker} computed something else than this machine in layer {self._layer}",
                "its memory or its copy of the checkpoint is damaged: restart it, and check its hardware if that "
                "repeats",
            )

    def _retry(self, failure: Failed) -> None:
        """A call brought nothing: have its pairs executed by another worker, or here after the others' answers."""
        if failure.hedged:
            return
        lost = failure.outstanding
        if lost.transport not in self._gone:
            self._gone.append(lost.transport)
        if lost.call.request_id in self._retries:
            self._here.append(lost.positions)
            return
        owners = self._others(self._flat[lost.positions], self._gone)
        mine = self._send_all(lost.positions, owners, self._until)
        if mine.size:
            self._here.append(mine)

    def _hedge(self, outstanding: Outstanding, answered: Answered) -> bool:
        """Execute a call's pairs here, expert by expert, unless the answer comes before the last one."""
        places = outstanding.positions
        experts = self._flat[places]
        groups = [places[experts == e] for e in dict.fromkeys(experts.tolist())]
        outputs = []
        for group in groups:
            if answered():
                return False
            try:
                outputs.append(self._compute(group))
            except TitanError as error:  # the answer may still come: wait for it
                log.warning(f"executing here instead of waiting failed: {error}", worker=outstanding.worker)
                return False
        for group, y in zip(groups, outputs, strict=True):
            self._outputs.add(group, y)
        self._site.executed.hedged += places.size
        return True

    # here -----------------------------------------------------------------------------------------------------------

    def _begin_here(self, positions: np.ndarray) -> None:
        """Raises what reading raised when no worker has the experts that could not be read."""
        try:
            mx.async_eval(self._execute_here(positions))
        except (StoreError, CheckpointError) as error:
            experts = self._flat[positions]
            owners = self._anybody(experts)
            require_owners(experts, owners, self._local, error)
            mine = self._send_all(positions, owners)
            self._site.executed.rescued += positions.size - mine.size
            if mine.size:
                mx.async_eval(self._execute_here(mine))

    def _execute_here(self, positions: np.ndarray) -> mx.array:
        in_slots = count_in_slots(self._local, self._flat[positions])
        y = self._compute(positions)
        self._site.executed.at_home(positions.size, in_slots)
        self._outputs.add(positions, y)
        return y

    def _compute(self, positions: np.ndarray) -> mx.array:
        return self._local.run_pairs(self._x, self._rows[positions], self._flat[positions], sort=self._sort)


def require_owners(experts: np.ndarray, owners: Owners, local: ExpertLayer, error: TitanError) -> None:
    """Raises `error`, which reading some of `experts` raised, unless each has an owner or is in a slot here."""
    if any(e not in owners and e not in local.table.slots for e in experts.reshape(-1).tolist()):
        raise error
    log.warning(f"a worker executes what could not be read here: {error}")


def count_in_slots(local: ExpertLayer, experts: np.ndarray) -> int:
    """Pairs whose expert [P] is in a slot here."""
    slots = local.table.slots
    return sum(e in slots for e in experts.tolist())


def _local_s(local: ExpertLayer, experts: np.ndarray) -> float:
    """What executing these experts here would take: reading those that are not in a slot, at this layer's own rate."""
    fetch_s = local.table.counts.fetch_s
    missing = sum(e not in local.table.slots for e in set(experts.tolist()))
    return float("inf") if fetch_s is None else missing * fetch_s
