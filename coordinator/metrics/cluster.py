"""A cluster as samples. Reads counters of other threads; a figure may be one step old."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from titan.common.metrics import Sample
from titan.common.platform import process_memory_bytes
from titan.coordinator.cluster import Cluster
from titan.coordinator.host.budget import kv_bytes_per_token
from titan.coordinator.metrics.layers import layer_samples
from titan.coordinator.metrics.workers import worker_samples

__all__ = ["cluster_samples"]


def cluster_samples(cluster: Cluster) -> Iterator[Sample]:
    yield from _executed(cluster)
    yield from _disk(cluster)
    yield from _memory(cluster)
    yield from layer_samples(cluster)
    yield from worker_samples(cluster)


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


def _disk(cluster: Cluster) -> Iterator[Sample]:
    counts = cluster.store.counts
    yield Sample("titan_store_read_bytes", "counter", "Bytes of experts read from disk.", counts.bytes)
    yield Sample("titan_store_reads", "counter", "System calls that read experts.", counts.reads)
    yield Sample("titan_store_read_seconds", "counter", "Inside reads, over all threads.", counts.seconds)


def _memory(cluster: Cluster) -> Iterator[Sample]:
    memory = cluster.memory
    text = "Planned memory, by use."
    yield Sample("titan_memory_budget_bytes", "gauge", text, memory.experts_bytes, {"use": "experts"})
    yield Sample("titan_memory_budget_bytes", "gauge", text, memory.non_expert_bytes, {"use": "non_expert"})
    yield Sample("titan_memory_budget_bytes", "gauge", text, memory.kv_bytes, {"use": "kv"})
    yield Sample("titan_memory_resident_bytes", "gauge", "What the process holds.", process_memory_bytes())
    slots = sum(layer.buffers.nbytes for layer in list(cluster.layers.values()))
    yield Sample("titan_memory_slots_bytes", "gauge", "What the expert slots hold.", slots)
    yield Sample("titan_memory_mlx_active_bytes", "gauge", "Arrays that MLX holds.", mx.get_active_memory())
    yield Sample("titan_memory_mlx_cache_bytes", "gauge", "Freed memory that MLX keeps.", mx.get_cache_memory())
    kv_bytes = kv_bytes_per_token(cluster.checkpoint, cluster.dtype)
    yield Sample("titan_kv_token_bytes", "gauge", "Bytes of one place in KV memory.", kv_bytes)
    cache = cluster.prompt_cache
    if cache is not None:
        yield Sample("titan_prompt_cache_bytes", "gauge", "KV of known prompts.", cache.nbytes, {"tier": "memory"})
        if cache.disk is not None:
            yield Sample(
                "titan_prompt_cache_bytes", "gauge", "KV of known prompts.", cache.disk.nbytes, {"tier": "disk"}
            )
            yield Sample("titan_prompt_cache_damaged", "counter", "Entries dropped as damaged.", cache.disk.damaged)
