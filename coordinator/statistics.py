"""What the SSD tier does, as JSON values for `/v1/titan/stats` and `titan stats`: layers, disk, prefetch, workers.

Counts since the model was loaded, without what loading itself read. Reads counters of other threads; a figure may be
one step old.
"""

from __future__ import annotations

from typing import Any

from titan.common.experts import ExpertLayer
from titan.coordinator.cluster import Cluster
from titan.coordinator.remote.link import WorkerLink

__all__ = ["cluster_stats"]

COUNTED = ("hits", "misses", "loads", "bytes", "prefetched", "useful", "late", "stall_s")


def cluster_stats(cluster: Cluster) -> dict[str, Any]:
    """Any thread may ask; before the model is loaded there are no layers.

    `hit_rate` is hits ÷ (hits + misses) of the experts that were looked for in slots here, `precision` (q) the share of
    the prefetched experts that were chosen, `recall` (r') the share of the would-be misses that a prefetch brought in
    time. None where there is nothing to divide by.
    """
    layers = [_layer(index, layer) for index, layer in list(cluster.layers.items())]
    total: dict[str, Any] = {key: sum(layer[key] for layer in layers) for key in COUNTED}
    return {
        "model": cluster.name,
        "policy": cluster.options.policy,
        "prefetch": cluster.options.prefetch,
        "layers": layers,
        "total": total | _rates(total),
        "disk": _disk(cluster),
        "workers": [_worker(cluster, link) for link in cluster.links],
    }


def _layer(index: int, layer: ExpertLayer) -> dict[str, Any]:
    table = layer.table
    counts = table.counts
    loads = counts.loads - counts.installed
    found: dict[str, Any] = {
        "layer": index,
        "slots": table.capacity,
        "pinned": len(table.pinned),
        "whole": layer.whole,
        "hits": counts.hits,
        "misses": counts.misses,
        "loads": loads,
        "bytes": loads * layer.buffers.layer.expert_bytes,
        "prefetched": counts.prefetched,
        "useful": counts.useful,
        "late": counts.late,
        "stall_s": counts.stall_s,
    }
    return found | _rates(found)


def _rates(counts: dict[str, Any]) -> dict[str, float | None]:
    return {
        "hit_rate": _share(counts["hits"], counts["hits"] + counts["misses"]),
        "precision": _share(counts["useful"], counts["prefetched"]),
        "recall": _share(counts["useful"], counts["useful"] + counts["misses"]) if counts["prefetched"] else None,
    }


def _disk(cluster: Cluster) -> dict[str, Any]:
    """Bytes a second of one reader, as serving got them, beside what calibration measured, cold and cached."""
    counts, figures = cluster.store.counts, cluster.figures
    expert_bytes = cluster.checkpoint.shape.layers[0].expert_bytes
    home = figures.home if figures is not None else None
    return {
        "bytes": counts.bytes,
        "reads": counts.reads,
        "experts": counts.experts,
        "bytes_per_s": _share(counts.bytes, counts.seconds),
        "device_bytes_per_s": _share(expert_bytes, home.ssd_s) if home is not None else None,
        "page_cache_bytes_per_s": _share(expert_bytes, home.page_cache_s) if home is not None else None,
        "readers": home.readers if home is not None else None,
        "retries": counts.retries,
        "other_copy": counts.other_copy,
        "mismatches": counts.mismatches,
    }


def _worker(cluster: Cluster, link: WorkerLink) -> dict[str, Any]:
    dispatcher, status, ready = cluster.dispatcher, link.last_status, link.ready
    typical = ready.times.typical() if ready is not None else None
    found: dict[str, Any] = {
        "name": link.name,
        "state": link.status.state,
        "transport": ready.transport.name if ready is not None else None,
        "pairs": dispatcher.executed.remote.get(link.name, 0) if dispatcher is not None else 0,
        "reply_s": typical[1] if typical is not None else None,
        "set_aside": link.times_set_aside,
        "expert_bytes": status.expert_bytes if status is not None else None,
        "memory_budget_bytes": link.memory_budget_bytes,
        "cache": None,
    }
    if status is not None and status.cache.slots:
        cache = status.cache
        counted = {"hits": cache.hits, "misses": cache.misses, "prefetched": cache.prefetched, "useful": cache.useful}
        found["cache"] = counted | _rates(counted)
        found["cache"] |= {"slots": cache.slots, "loads": cache.loads, "bytes": cache.bytes, "late": cache.late}
        found["cache"] |= {"stall_s": cache.stall_s, "hints": cache.hints, "hints_unused": cache.hints_unused}
    return found


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
