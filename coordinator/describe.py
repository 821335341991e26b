"""A cluster as JSON values, for `/v1/titan/cluster` and `titan top`: the plan in short, nodes, workers, counters."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from titan.common.platform import process_memory_bytes
from titan.coordinator.cluster import Cluster
from titan.coordinator.moe.layer_times import PARTS
from titan.coordinator.planning import held_bytes

__all__ = ["describe_cluster"]


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """Any thread may ask; before the model is loaded, plan and counters are missing."""
    return {
        "model": {
            "name": cluster.name,
            "fingerprint": cluster.checkpoint.shape.fingerprint,
            "layers": len(cluster.checkpoint.shape.layers),
            "experts": cluster.checkpoint.shape.num_experts,
            "top_k": cluster.checkpoint.shape.top_k,
            "context_tokens": cluster.memory.context_tokens,
        },
        "plan": _plan(cluster),
        "workers": [_worker(cluster, i) for i in range(len(cluster.links))],
        "executed": _executed(cluster),
        "slots": _slots(cluster),
        "store": {
            "bytes": cluster.store.counts.bytes,
            "reads": cluster.store.counts.reads,
            "experts": cluster.store.counts.experts,
        },
        "layers": _layers(cluster),
        "memory": _memory(cluster),
        "prompt_cache": _prompt_cache(cluster),
    }


def _plan(cluster: Cluster) -> dict[str, Any] | None:
    plan = cluster.plan
    if plan is None:
        return None
    held = [sum(len(experts) for experts in plan.held_by(i)) for i in range(len(plan.nodes))]
    whole = sum(plan.is_whole(i) for i in range(len(plan.layers)))
    nodes = [{"name": node.name, "experts": count} for node, count in zip(plan.nodes, held, strict=True)]
    return {"nodes": nodes, "whole_layers": whole, "layers": len(plan.layers)}


def _worker(cluster: Cluster, number: int) -> dict[str, Any]:
    link = cluster.links[number]
    status = link.status
    return {
        "name": status.name,
        "state": status.state,
        "reason": status.reason,
        "address": status.address,
        "epoch": status.epoch,
        "set_aside": link.times_set_aside,
        "breaker": link.breaker.state,
        "failures": link.breaker.failures,
        "memory_budget_bytes": link.memory_budget_bytes,
        "assigned_bytes": 0 if cluster.plan is None else held_bytes(cluster.plan, number + 1),
        "traffic": None if (traffic := cluster.exchange.traffic.get(link.name)) is None else asdict(traffic),
    }


def _executed(cluster: Cluster) -> dict[str, Any] | None:
    dispatcher = cluster.dispatcher
    if dispatcher is None:
        return None
    done = dispatcher.executed
    return {
        "local": done.local,
        "ssd": done.ssd,
        "remote": dict(done.remote),
        "fallbacks": done.fallbacks,
        "late": cluster.exchange.late,
        "wait_s": done.wait_s,
    }


def _slots(cluster: Cluster) -> dict[str, int]:
    counts = [layer.table.counts for layer in list(cluster.layers.values())]
    return {
        "hits": sum(c.hits for c in counts),
        "misses": sum(c.misses for c in counts),
        "loads": sum(c.loads for c in counts),
        "prefetched": sum(c.prefetched for c in counts),
        "useful": sum(c.useful for c in counts),
        "prefetched_late": sum(c.late for c in counts),
    }


def _layers(cluster: Cluster) -> list[dict[str, Any]]:
    """Mean microseconds of each layer's parts over the passes that were measured."""
    times = {} if cluster.layer_times is None else dict(cluster.layer_times.layers)
    return [
        {"layer": layer, "passes": parts.passes}
        | {f"{part}_us": round(1e6 * getattr(parts, part) / parts.passes, 1) for part in PARTS}
        for layer, parts in sorted(times.items())
    ]


def _memory(cluster: Cluster) -> dict[str, int]:
    memory = cluster.memory
    return {
        "resident_bytes": process_memory_bytes(),
        "slots_bytes": sum(layer.buffers.nbytes for layer in list(cluster.layers.values())),
        "experts_budget_bytes": memory.experts_bytes,
        "non_expert_bytes": memory.non_expert_bytes,
        "kv_budget_bytes": memory.kv_bytes,
    }


def _prompt_cache(cluster: Cluster) -> dict[str, int] | None:
    cache = cluster.prompt_cache
    if cache is None:
        return None
    return {
        "memory_bytes": cache.nbytes,
        "disk_bytes": 0 if cache.disk is None else cache.disk.nbytes,
        "prompt_tokens": cache.counts.prompt_tokens,
        "reused_tokens": cache.counts.reused_tokens,
    }
