"""Which worker executes which expert of a layer: the online choice of z, among those who are ready now.

With the plan's costs the cheapest executor is chosen; without them whoever holds an expert. Knows figures, who is ready
and what is in a slot here; not how a request travels.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import numpy as np

from titan.coordinator.moe.workers import ReadyWorker
from titan.placement.cost import Costs
from titan.placement.dispatch import choose
from titan.placement.dispatch_rows import choose_rows

MAX_ROWS = 32  # beyond it the choice itself would cost more than it brings: every expert goes to a holder
EVICTED_AGAIN = 1.0  # an expert that a read throws out is taken to be read back: in tight memory it mostly is

Owners = Mapping[int, ReadyWorker]  # distinct expert -> who executes it; the others run at home


def choose_owners(
    layer: int,
    experts: np.ndarray,
    ready: Sequence[tuple[int, ReadyWorker]],
    here: Container[int],
    costs: Costs | None,
) -> Owners:
    """Who executes the experts that are not to be executed here.

    Args:
        experts: [N, K] the router's choice.
        ready: (node of the plan, session) in the plan's order of preference.
        here: experts in a slot of this machine.
        costs: of all nodes of the plan.
    """
    if costs is not None:
        by_node = dict(ready)
        held = [(node, state.held.get(layer, ())) for node, state in ready]
        served = [(node, r.served[layer], r.times.served_s) for node, r in ready if layer in r.served]
        return {e: by_node[node] for e, node in choose_nodes(experts, held, here, costs, served).items()}
    owners = {}
    for expert in set(experts.reshape(-1).tolist()):
        if expert in here:
            continue
        holders = [state for _, state in ready if expert in state.held.get(layer, ())]
        if found := holders or [state for _, state in ready if expert in state.served.get(layer, ())]:
            owners[expert] = found[0]
    return owners


def choose_nodes(
    experts: np.ndarray,
    holders: Sequence[tuple[int, Container[int]]],
    here: Container[int],
    costs: Costs,
    served: Sequence[tuple[int, Container[int], float | None]] = (),
) -> Mapping[int, int]:
    """Expert -> node for the distinct experts that are to be executed by a worker; the others run at home.

    Args:
        experts: [N, K] the router's choice.
        holders: (node, experts it holds in this layer) of the workers that are ready; node 0 is this machine.
        here: experts in a slot of this machine.
        costs: of all nodes of the plan.
        served: (node, experts it reads from its own disk when nobody holds them, seconds such an expert adds there);
            the seconds are its lambda in (5), None while it is not known: then this machine's is taken.
    """
    distinct, rows = np.unique(experts, return_counts=True)
    selected = distinct.tolist()
    at = {e: [node for node, held in holders if e in held] for e in selected}
    queue_s = [0.0] * len(costs.pair_s) if served else None
    for node, experts_there, seconds in served:
        for e in selected:
            if not at[e] and e not in here and e in experts_there:
                at[e].append(node)
                assert queue_s is not None
                queue_s[node] += costs.ssd_s if seconds is None else seconds
    if experts.shape[0] > MAX_ROWS:
        return {e: nodes[0] for e, nodes in at.items() if nodes and e not in here}
    evict_s = EVICTED_AGAIN * costs.ssd_s
    if experts.shape[0] == 1:
        choice = choose(selected, at, costs, queue_s=queue_s, local_resident=here, evict_s=evict_s)  # type: ignore[arg-type]
    else:
        choice = choose_rows(
            selected,
            rows.tolist(),
            at,  # type: ignore[arg-type]
            costs,
            queue_s=queue_s,
            local_resident=here,
            evict_s=evict_s,
        )
    return {e: node for e, node in zip(selected, choice.nodes, strict=True) if node}
