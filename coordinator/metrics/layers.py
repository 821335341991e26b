"""Layers as samples: where their time goes, what their slots and the prefetcher do."""

from __future__ import annotations

from collections.abc import Iterator

from titan.common.metrics import Sample
from titan.common.prefetch.prefetcher import MAX_PREFETCH, Prefetcher
from titan.coordinator.cluster import Cluster
from titan.coordinator.moe.layer_times import PARTS

__all__ = ["layer_samples"]

_SLOT_HELP = {
    "hits": "Experts that were in a slot when asked for.",
    "misses": "Experts that were not.",
    "loads": "Experts read into a slot.",
    "evictions": "Experts thrown out of a slot.",
    "prefetched": "Experts read because they were predicted.",
    "useful": "Predicted experts that were chosen before they were thrown out.",
    "late": "Predicted experts that were needed while still in flight.",
    "cancelled": "Predicted reads taken back before they began.",
}


def layer_samples(cluster: Cluster) -> Iterator[Sample]:
    yield from _times(cluster)
    yield from _slots(cluster)
    prefetcher = None if cluster.dispatcher is None else cluster.dispatcher.prefetcher
    if prefetcher is not None:
        yield from _prefetch(prefetcher)


def _times(cluster: Cluster) -> Iterator[Sample]:
    if cluster.layer_times is None:
        return
    for layer, parts in list(cluster.layer_times.layers.items()):
        text = "Time of a layer in the passes that are measured, by part."
        for part in PARTS:
            labels = {"layer": str(layer), "part": part}
            yield Sample("titan_layer_seconds", "counter", text, getattr(parts, part), labels)
        text = "Forward passes in which the layer was measured."
        yield Sample("titan_layer_measured_passes", "counter", text, parts.passes, {"layer": str(layer)})


def _slots(cluster: Cluster) -> Iterator[Sample]:
    for layer, experts in list(cluster.layers.items()):
        counts, labels = experts.table.counts, {"layer": str(layer)}
        for name, text in _SLOT_HELP.items():
            yield Sample(f"titan_slot_{name}", "counter", text, getattr(counts, name), labels)
        yield Sample("titan_slot_stall_seconds", "counter", "Waiting for reads of experts.", counts.stall_s, labels)
        text = "Of that, waiting for predicted experts that were late."
        yield Sample("titan_slot_late_seconds", "counter", text, counts.late_s, labels)
        yield Sample("titan_slots", "gauge", "Slots of a layer.", experts.table.capacity, labels)


def _prefetch(prefetcher: Prefetcher) -> Iterator[Sample]:
    """Recall and precision as the shadow scores have it, over all layers."""
    for number, predictor in enumerate(prefetcher.predictors):
        scores = [scores[number] for scores in prefetcher.scores]
        labels = {"predictor": predictor.name, "depth": str(predictor.depth)}
        said = sum(float(score.said[:MAX_PREFETCH].sum()) for score in scores)
        used = sum(float(score.used[:MAX_PREFETCH].sum()) for score in scores)
        caught = sum(float(score.absent_used[:MAX_PREFETCH].sum()) for score in scores)
        missed = sum(score.would_miss for score in scores)
        text = f"Share of would-be misses that the first {MAX_PREFETCH} predictions name."
        yield Sample("titan_prefetch_recall_ratio", "gauge", text, min(caught / missed, 1.0) if missed else 0.0, labels)
        text = f"Share of the first {MAX_PREFETCH} predictions that were chosen."
        yield Sample("titan_prefetch_precision_ratio", "gauge", text, used / said if said else 0.0, labels)
        acting = sum(choice is not None and choice.predictor is predictor for choice in list(prefetcher.choices))
        yield Sample("titan_prefetch_layers", "gauge", "Layers that read ahead by this predictor.", acting, labels)
