"""Moving to another plan while serving: workers exchange experts, then this machine's slots change layer by layer.

Requests go on between the steps of a move, and whatever is on its way is executed from where it still is. Knows the
cluster's surface; not why a plan is better than another.
"""

from __future__ import annotations

from titan.common.slots.buffers import LayerBuffers
from titan.coordinator.cluster import Cluster
from titan.coordinator.host.model import loose_experts, pin_local
from titan.coordinator.planning import log_plan
from titan.placement import Plan

__all__ = ["begin_move", "finish_move", "move_layer"]


def begin_move(cluster: Cluster, plan: Plan) -> list[int]:
    """Have the workers exchange experts; returns the positions of layers whose slots here change, shrinking first.

    From any thread.

    Raises:
        PlanError: the plan is not one of this cluster.
    """
    cluster.planner.check(plan)
    log_plan(plan)
    cluster.workers.assign(plan)
    tables = [cluster.layers[layer].table for layer in plan.layers]
    growth = [new - table.capacity for new, table in zip(plan.slots[0], tables, strict=True)]
    pinned = [{e for e, holders in enumerate(row) if 0 in holders} for row in plan.residency]
    changed = [i for i, table in enumerate(tables) if growth[i] or pinned[i] != table.pinned]
    return sorted(changed, key=lambda position: growth[position])


def move_layer(cluster: Cluster, plan: Plan, position: int) -> None:
    """Give a layer the slots of `plan`, with what the old ones hold of it. On the engine's thread, between two steps.

    The old slots live until the new ones are filled, so that a disk that fails leaves the layer as it was: for that
    time this machine holds up to one layer's slots beyond M_0, out of the reserve. What the policy and the prefetcher
    have learned about the layer stays.
    """
    index = plan.layers[position]
    model, dispatcher = cluster.model, cluster.dispatcher
    assert model is not None
    assert dispatcher is not None
    old = cluster.layers[index]
    if old.incoming is not None:
        old.incoming.clear()
    spec = cluster.checkpoint.shape.layers[position]
    new = old.heir(LayerBuffers(spec, plan.slots[0][position], cluster.dtype))
    pin_local(new, plan, position, old)
    new.adopt(old, loose_experts(new, plan, position))
    cluster.layers[index] = new
    model.bind_layer(index, new, dispatcher)
    if dispatcher.prefetcher is not None:
        dispatcher.prefetcher.replace(position, new)


def finish_move(cluster: Cluster, plan: Plan) -> None:
    """All layers have moved: dispatch by the new plan. On the engine's thread, between two steps."""
    assert cluster.dispatcher is not None
    assert cluster.model is not None
    cluster.plan = plan
    cluster.dispatcher.costs = cluster.planner.costs(plan)
    if cluster.dispatcher.prefetcher is None or all(layer.whole for layer in cluster.layers.values()):
        cluster.dispatcher.prefetcher = cluster.make_prefetcher(cluster.model)
