"""Experts, slots, disk and workers as samples. Reads counters of other threads; a figure may be one step old."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from titan.common.metrics import Sample
from titan.common.platform import process_memory_bytes
from titan.coordinator.cluster import Cluster

__all__ = ["cluster_samples"]

_STATES = ("connecting", "greeted", "installing", "ready", "away", "closed")
_SLOT_HELP = {
    "hits": "Experts that were in a slot when asked for.",
    "misses": "Experts that were not.",
    "loads": "Experts read into a slot.",
    "evictions": "Experts thrown out of a slot.",
    "prefetched": "Experts read because they were predicted.",
    "useful": "Predicted experts that were chosen before they were thrown out.",
    "late": "Predicted experts that were needed while still in flight.",
    "cancelled": "Predicted reads taken back before they began.",
    "streamed": "Missing experts of prompts that were executed past the slots.",
}


def cluster_samples(cluster: Cluster) -> Iterator[Sample]:
    yield from _executed(cluster)
    yield from _slots(cluster)
    yield from _disk(cluster)
    yield from _memory(cluster)
    yield from _workers(cluster)


def _executed(cluster: Cluster) -> Iterator[Sample]:
    dispatcher = cluster.dispatcher
    if dispatcher is None:
        return
    done, name = dispatcher.executed, "titan_expert_pairs"
    text = "(row, expert) pairs executed, by where."
    yield Sample(name, "counter", text, done.local, {"where": "local"})
    yield Sample(name, "counter", text, done.ssd, {"where": "ssd"})
    for worker, pairs in list(done.remote.items()):
        yield Sample(name, "counter", text, pairs, {"where": worker})
    yield Sample("titan_expert_fallback_pairs", "counter", "Pairs sent to a worker in vain.", done.fallbacks)
    yield Sample("titan_remote_layers", "counter", "Layers that asked a worker.", done.remote_layers)
    yield Sample("titan_remote_wait_seconds", "counter", "Waiting for workers.", done.wait_s)
    yield Sample("titan_late_replies", "counter", "Answers that nobody waited for any more.", cluster.exchange.late)


def _slots(cluster: Cluster) -> Iterator[Sample]:
    for layer, experts in list(cluster.layers.items()):
        counts, labels = experts.table.counts, {"layer": str(layer)}
        known = {field.name for field in fields(counts)}
        for name, text in _SLOT_HELP.items():
            if name in known:
                yield Sample(f"titan_slot_{name}", "counter", text, getattr(counts, name), labels)
        yield Sample("titan_slot_stall_seconds", "counter", "Waiting for reads of experts.", counts.stall_s, labels)
        yield Sample("titan_slots", "gauge", "Slots of a layer.", experts.table.capacity, labels)


def _disk(cluster: Cluster) -> Iterator[Sample]:
    counts = cluster.store.counts
    yield Sample("titan_store_read_bytes", "counter", "Bytes of experts read from disk.", counts.bytes)
    yield Sample("titan_store_reads", "counter", "System calls that read experts.", counts.reads)
    yield Sample("titan_store_read_seconds", "counter", "Inside reads, over all threads.", counts.seconds)


def _memory(cluster: Cluster) -> Iterator[Sample]:
    memory = cluster.memory
    text = "Planned memory, by use."
    yield Sample("titan_memory_budget_bytes", "gauge", text, memory.experts_bytes, {"use": "experts"})
    stream = cluster.stream
    if stream is not None:
        yield Sample("titan_memory_budget_bytes", "gauge", text, stream.nbytes, {"use": "prefill_buffers"})
    yield Sample("titan_memory_budget_bytes", "gauge", text, memory.non_expert_bytes, {"use": "non_expert"})
    yield Sample("titan_memory_budget_bytes", "gauge", text, memory.kv_bytes, {"use": "kv"})
    yield Sample("titan_memory_resident_bytes", "gauge", "What the process holds.", process_memory_bytes())
    cache = cluster.prompt_cache
    if cache is not None:
        yield Sample("titan_prompt_cache_bytes", "gauge", "KV of known prompts.", cache.nbytes, {"tier": "memory"})
        if cache.disk is not None:
            yield Sample(
                "titan_prompt_cache_bytes", "gauge", "KV of known prompts.", cache.disk.nbytes, {"tier": "disk"}
            )
            yield Sample("titan_prompt_cache_damaged", "counter", "Entries dropped as damaged.", cache.disk.damaged)


def _workers(cluster: Cluster) -> Iterator[Sample]:
    for link in cluster.links:
        for state in _STATES:
            labels = {"worker": link.name, "state": state}
            yield Sample("titan_worker_state", "gauge", "1 for the state.", float(link.status.state == state), labels)
        labels = {"worker": link.name}
        yield Sample("titan_worker_set_aside", "counter", "Times it was set aside.", link.times_set_aside, labels)
        yield Sample("titan_worker_epoch", "gauge", "Number of its session.", link.status.epoch, labels)
