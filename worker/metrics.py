"""A worker's counters as samples for Prometheus, and who may look at them.

Reads counters of other threads; a figure may be one request old. Touches no array.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from titan.common.config.address import normalise_address, split_address
from titan.common.metrics import CollectorRegistry, Figures, Sample, metrics_text
from titan.common.metrics_server import MetricsServer
from titan.common.platform import process_memory_bytes
from titan.common.security.identity import Role, parse_identity, require_role
from titan.common.slots.table import SlotCounts
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.worker.cache import ExpertCache
from titan.worker.hints import DROPPED
from titan.worker.own_copy import Reads
from titan.worker.server import WorkerServer
from titan.worker.service import WorkerService

DEFAULT_PORT = 9177


def serve_metrics(address: str, server: WorkerServer, service: WorkerService, store: Reads | None) -> MetricsServer:
    """Serve /metrics at `address`: to this machine when it is loopback, else to coordinators and operators over TLS.

    Raises:
        ConfigError: not an address. AddressInUse: it cannot be listened on.
    """
    registry = CollectorRegistry()
    registry.register(Figures(lambda: worker_samples(server, service), lambda: _disk(store)))
    host, port = split_address(normalise_address(address, DEFAULT_PORT, any_port=True))
    return MetricsServer(host, port, lambda: metrics_text(registry), server.trust.lane_context, _admit)


def _admit(certificate: bytes) -> None:
    require_role(parse_identity(certificate), Role.COORDINATOR, Role.OPERATOR)


def worker_samples(server: WorkerServer, service: WorkerService) -> Iterator[Sample]:
    yield from _state(server, service)
    yield from _execution(service)
    yield from _experts(service)
    yield from _connections(server, service)


def _state(server: WorkerServer, service: WorkerService) -> Iterator[Sample]:
    credentials, revoked = server.trust.credentials, server.trust.revocations.current
    info = {"worker": service.name, "version": SOFTWARE_VERSION, "mlx": MLX_VERSION}
    yield Sample("titan_worker_info", "gauge", "1, with what this worker is as labels.", 1, info)
    started = time.time() - (time.monotonic() - service.started)
    yield Sample("titan_worker_start_time_seconds", "gauge", "Unix time at which it started.", started)
    yield Sample("titan_worker_draining", "gauge", "1 while it shuts down.", float(service.draining))
    expires = credentials.identity.not_after.timestamp()
    yield Sample("titan_worker_certificate_expiry_seconds", "gauge", "Unix time its certificate ends.", expires)
    yield Sample("titan_worker_revocation_list_number", "gauge", "Of the list it has; 0 for none.", revoked.number)


def _execution(service: WorkerService) -> Iterator[Sample]:
    execution, queue = service.execution, service.requests
    done = execution.executed
    yield from execution.answers.samples("titan_worker_requests", "Execute requests that were answered, by result.")
    yield Sample("titan_worker_executed_rows", "counter", "Rows of activations executed.", done.rows)
    yield Sample("titan_worker_executed_pairs", "counter", "(row, expert) pairs executed.", done.pairs)
    yield Sample("titan_worker_compute_seconds", "counter", "Inside kernels, a shared one once.", done.compute_s)
    yield Sample("titan_worker_load_seconds", "counter", "Waiting for experts that were not in memory.", done.load_s)
    yield Sample("titan_worker_queue_wait_seconds", "counter", "Waiting of all requests together.", queue.waited_s)
    yield Sample("titan_worker_merged_requests", "counter", "Requests that shared a kernel.", queue.merged)
    yield Sample("titan_worker_queued_requests", "gauge", "Requests that wait.", len(queue))


def _experts(service: WorkerService) -> Iterator[Sample]:
    holdings = service.holdings
    resident, experts, slots = holdings.resident if holdings is not None else (0, 0, 0)
    yield Sample("titan_worker_experts", "gauge", "Experts in slots.", experts)
    yield Sample("titan_worker_slots", "gauge", "Slots, of all layers.", slots)
    yield Sample("titan_worker_expert_bytes", "gauge", "Memory of all slots.", resident)
    yield Sample("titan_worker_expert_budget_bytes", "gauge", "What experts may take.", service.budget_bytes)
    yield Sample("titan_worker_process_bytes", "gauge", "What the process holds.", process_memory_bytes())
    yield from _slots(service)
    yield from _cache(service.cache)
    yield from service.sources.installed.samples(
        "titan_worker_installed_bytes", "Bytes of experts installed, by source."
    )


def _slots(service: WorkerService) -> Iterator[Sample]:
    """What was found in slots and what was read into them; a pinned expert is always found."""
    holdings, hints = service.holdings, service.execution.hints
    counts = holdings.total if holdings is not None else SlotCounts()
    unpinned = holdings.unpinned_slots if holdings is not None else 0
    loads, loaded_bytes = counts.loads - counts.installed, holdings.loaded_bytes if holdings is not None else 0
    yield Sample("titan_worker_unpinned_slots", "gauge", "Slots for experts read when asked for.", unpinned)
    yield Sample("titan_worker_slot_hits", "counter", "Experts asked for that were in a slot.", counts.hits)
    yield Sample("titan_worker_slot_misses", "counter", "Experts asked for that were not.", counts.misses)
    yield Sample("titan_worker_slot_loads", "counter", "Experts read for requests and hints.", max(0, loads))
    yield Sample("titan_worker_slot_load_bytes", "counter", "Their bytes.", max(0, loaded_bytes))
    yield Sample("titan_worker_slot_evictions", "counter", "Experts that made room for others.", counts.evictions)
    text = "Experts read because of hints."
    yield Sample("titan_worker_prefetched_experts", "counter", text, counts.prefetched)
    text = "Of them, chosen before they were thrown out."
    yield Sample("titan_worker_useful_prefetched_experts", "counter", text, counts.useful)
    text = "Of them, needed while still on their way."
    yield Sample("titan_worker_late_prefetched_experts", "counter", text, counts.late)
    text = "Waiting for them."
    yield Sample("titan_worker_late_prefetch_wait_seconds", "counter", text, counts.late_s)
    yield Sample("titan_worker_received_hints", "counter", "Hints that came.", hints.came)
    yield Sample("titan_worker_followed_hints", "counter", "Hints that began a read.", hints.followed)
    yield Sample("titan_worker_waiting_hints", "gauge", "Hints that wait.", len(hints))
    for reason in DROPPED:
        text = "Hints that led to nothing, by reason."
        yield Sample("titan_worker_dropped_hints", "counter", text, hints.dropped.of(reason), {"reason": reason})


def _cache(cache: ExpertCache | None) -> Iterator[Sample]:
    if cache is None:
        return
    counts = cache.counts
    yield Sample("titan_worker_cache_bytes", "gauge", "Size of the experts kept on disk.", cache.used_bytes)
    yield Sample("titan_worker_cache_limit_bytes", "gauge", "What they may take.", cache.limit_bytes)
    yield Sample("titan_worker_cache_experts", "gauge", "Experts kept on disk, of all models.", cache.experts)
    yield Sample("titan_worker_cache_reads", "counter", "Experts installed from there.", counts.read)
    yield Sample("titan_worker_cache_writes", "counter", "Experts written there.", counts.written)
    yield Sample("titan_worker_cache_evictions", "counter", "Experts that made room for others.", counts.evicted)
    yield Sample("titan_worker_cache_damaged", "counter", "Experts dropped as damaged.", counts.damaged)
    yield Sample("titan_worker_cache_skipped", "counter", "Experts not kept for want of room or disk.", counts.skipped)


def _disk(store: Reads | None) -> Iterator[Sample]:
    counts = store.counts if store is not None else None
    figures = (counts.bytes, counts.reads, counts.seconds) if counts is not None else (0, 0, 0.0)
    yield Sample("titan_worker_store_read_bytes", "counter", "Bytes of experts read from disk.", figures[0])
    yield Sample("titan_worker_store_reads", "counter", "System calls that read experts.", figures[1])
    yield Sample("titan_worker_store_read_seconds", "counter", "Inside reads, over all threads.", figures[2])


def _connections(server: WorkerServer, service: WorkerService) -> Iterator[Sample]:
    sessions, lanes = service.sessions, service.execution.lane_counts
    yield Sample("titan_worker_sessions", "gauge", "Coordinators that have a session.", len(sessions.live()))
    yield Sample("titan_worker_opened_sessions", "counter", "Sessions opened.", sessions.opened)
    streams = sum(session.streams for session in sessions.live()) - lanes.open
    yield Sample("titan_worker_grpc_streams", "gauge", "Execute streams that are open.", max(0, streams))
    yield Sample("titan_worker_lanes", "gauge", "Lanes that are open.", lanes.open)
    text = "Connections accepted, by port; of gRPC, handshakes begun."
    yield Sample("titan_worker_connections", "counter", text, server.trust.handshakes, {"port": "grpc"})
    yield Sample("titan_worker_connections", "counter", text, lanes.accepted, {"port": "lane"})
    text = "Connections whose peer showed a certificate of the cluster (gRPC: with a call). The rest failed."
    yield Sample("titan_worker_proved_connections", "counter", text, server.trust.gate.connections, {"port": "grpc"})
    yield Sample("titan_worker_proved_connections", "counter", text, lanes.proved, {"port": "lane"})
    yield Sample("titan_worker_malformed_frames", "counter", "Frames that ended their lane.", lanes.malformed)
    yield from service.refusals.samples("titan_worker_refusals", "Calls and lanes refused, by whom and why.")
