"""Who executes which selected expert in this layer and step: the online choice of z.

Minimises max_n(c_n k_n + rho_0n) + sigma exactly for one row (equations 5 and 6): every expert goes to a node that
holds it in memory, or is read from node 0's SSD. It knows figures and holders, not sessions or slot tables.

How: let the makespan t grow over the finishing times of the nodes. At each t a node has room for a number of experts;
the experts that find no room on a holder are misses, which node 0 reads and executes. Growing t adds room one place at
a time, and one augmenting path keeps the matching of experts to rooms maximal, workers' rooms first.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from titan.placement.cost import Costs


class Choice(NamedTuple):
    """Where a layer's experts run.

    Args:
        nodes: node index per selected expert, in the order they were given.
        reads: experts that node 0 reads from its SSD first; they run on node 0.
        latency_s: max_n(c_n k_n + rho_0n) + sigma that the figures promise.
    """

    nodes: list[int]
    reads: list[int]
    latency_s: float


def choose(
    selected: Sequence[int],
    holders: Sequence[Sequence[int]],
    costs: Costs,
    *,
    queue_s: Sequence[float] | None = None,
    local_resident: Container[int] = (),
    down: Container[int] = (),
    evict_s: float = 0.0,
) -> Choice:
    """The cheapest execution of one row's experts. Exact.

    Args:
        selected: distinct expert ids the router chose (S_{t,l}).
        holders: [expert] -> nodes with it pinned in memory, `Plan.residency` of this layer.
        queue_s: seconds of work already waiting on each node.
        local_resident: experts that are in a cache slot of node 0 just now.
        down: nodes that must not be used; never node 0.
        evict_s: what reading an expert that some node holds is charged besides, for the cache slot it takes from
            another; it steers the choice and is not part of `latency_s`.
    """
    options = options_of(selected, holders, local_resident, down)
    wanted: dict[int, list[int]] = {0: []}  # node -> positions it could run without a read
    single = True
    for position, nodes in enumerate(options):
        if len(nodes) > 1:
            single = False
        for node in nodes:
            if node in wanted:
                wanted[node].append(position)
            else:
                wanted[node] = [position]
    if single:
        return _without_replicas(selected, options, wanted, costs, queue_s, evict_s)
    return _with_replicas(selected, options, wanted, costs, queue_s, evict_s)


def options_of(
    selected: Sequence[int], holders: Sequence[Sequence[int]], local_resident: Container[int], down: Container[int]
) -> list[list[int]]:
    """The nodes that have each selected expert in memory now; arguments as for `choose`."""
    options = []
    for expert in selected:
        nodes = [n for n in holders[expert] if n not in down] if down else list(holders[expert])
        if 0 not in nodes and expert in local_resident:
            nodes.append(0)
        options.append(nodes)
    return options


def _without_replicas(selected, options, wanted, costs: Costs, queue_s, evict_s: float) -> Choice:
    """Every expert has one holder at most: only reading instead of waiting for a worker is left to decide.

    While a worker is the last to finish, taking one expert from it is the only way to finish sooner.
    """
    pair, base = costs.pair_s, costs.base_s
    load = {node: len(positions) for node, positions in wanted.items()}
    missing = len(selected) - sum(load.values())
    finish = {}
    for node, count in load.items():
        if node and count:
            finish[node] = base[node] + count * pair[node] + (queue_s[node] if queue_s else 0.0)
    at_home = load[0] + missing
    home_start = base[0] + (queue_s[0] if queue_s else 0.0)
    shed: list[int] = []
    best_shed, best_s = 0, float("inf")
    while True:
        last = max(finish, key=finish.__getitem__) if finish else -1
        span = home_start + at_home * pair[0] if at_home else 0.0
        home_is_last = not finish or span >= finish[last]
        if not home_is_last:
            span = finish[last]
        stall = -(-missing // costs.readers) * costs.ssd_s + len(shed) * evict_s
        if span + stall < best_s:
            best_s, best_shed = span + stall, len(shed)
        if home_is_last or stall >= best_s:
            break
        shed.append(last)
        load[last] -= 1
        missing += 1
        at_home += 1
        if load[last]:
            finish[last] -= pair[last]
        else:
            del finish[last]
    nodes = [o[0] if o else 0 for o in options]
    reads = [e for e, o in zip(selected, options, strict=True) if not o]
    for worker in shed[:best_shed]:
        position = wanted[worker].pop()
        nodes[position] = 0
        reads.append(selected[position])
    return Choice(nodes, reads, best_s - best_shed * evict_s)


def _with_replicas(selected, options, wanted, costs: Costs, queue_s, evict_s: float) -> Choice:
    total = len(selected)
    pair, base = costs.pair_s, costs.base_s
    start = {n: base[n] + (queue_s[n] if queue_s else 0.0) for n in wanted}
    limit = {n: len(positions) for n, positions in wanted.items()}
    limit[0] = total  # misses run there too
    due = {n: start[n] + pair[n] for n in wanted if limit[n]}
    room = dict.fromkeys(wanted, 0)
    held: dict[int, list[int]] = {n: [] for n in wanted}
    place = [-1] * total
    unavoidable = sum(1 for o in options if not o)
    matched = on_workers = 0
    best_s, best_place = float("inf"), place
    while due:
        node = min(due, key=due.__getitem__)
        span = due[node]
        if span + -(-unavoidable // costs.readers) * costs.ssd_s >= best_s:
            break
        room[node] += 1
        if room[node] < limit[node]:
            due[node] = start[node] + (room[node] + 1) * pair[node]
        else:
            del due[node]
        gain = _grow(node, wanted, held, place)
        if gain == 2:
            matched += 1
        if gain and node:
            on_workers += 1
        if total - on_workers <= room[0]:
            misses = total - matched
            cost = span + -(-misses // costs.readers) * costs.ssd_s + (misses - unavoidable) * evict_s
            if cost < best_s:
                best_s, best_place = cost, place[:]
    reads = [e for e, node in zip(selected, best_place, strict=True) if node < 0]
    return Choice([max(0, node) for node in best_place], reads, best_s - (len(reads) - unavoidable) * evict_s)


def _grow(node: int, wanted: dict, held: dict, place: list[int]) -> int:
    """Use one new room of `node`: 2 when an unplaced expert got a place by it, 1 when node 0 was relieved, 0 else.

    Breadth first over "this node takes that expert from that node, which then takes another".
    """
    parent: dict[int, tuple[int, int]] = {}  # node -> (position taken from it, node that takes it)
    frontier, seen = [node], {node}
    while frontier:
        following = []
        for taker in frontier:
            for position in wanted[taker]:
                owner = place[position]
                if owner < 0:
                    _shift(position, taker, parent, held, place)
                    return 2
                if owner not in seen:
                    seen.add(owner)
                    parent[owner] = (position, taker)
                    following.append(owner)
        frontier = following
    if 0 in parent:
        position, taker = parent[0]
        held[0].remove(position)
        _shift(position, taker, parent, held, place)
        return 1
    return 0


def _shift(position: int, taker: int, parent: dict, held: dict, place: list[int]) -> None:
    while True:
        place[position] = taker
        held[taker].append(position)
        if taker not in parent:
            return
        given, next_taker = parent[taker]
        held[taker].remove(given)
        position, taker = given, next_taker
