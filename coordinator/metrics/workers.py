"""Workers as the coordinator sees them, as samples: sessions, breakers, bytes, where the time of answers went."""

from __future__ import annotations

from collections.abc import Iterator

from titan.common.metrics import Sample
from titan.coordinator.cluster import Cluster
from titan.coordinator.planning import held_bytes

__all__ = ["worker_samples"]

_STATES = ("connecting", "greeted", "installing", "ready", "away", "closed")
_BREAKER = ("closed", "open", "probing")


def worker_samples(cluster: Cluster) -> Iterator[Sample]:
    for position, link in enumerate(cluster.links, start=1):
        worker = {"worker": link.name}
        for state in _STATES:
            value, labels = float(link.status.state == state), worker | {"state": state}
            yield Sample("titan_worker_state", "gauge", "1 for the state.", value, labels)
        for state in _BREAKER:
            value, labels = float(link.breaker.state == state), worker | {"state": state}
            yield Sample("titan_worker_breaker_state", "gauge", "1 for the breaker's state.", value, labels)
        text = "Failures that time served well has not made good yet."
        yield Sample("titan_worker_breaker_failures", "gauge", text, link.breaker.failures, worker)
        yield Sample("titan_worker_set_aside", "counter", "Times it was set aside.", link.times_set_aside, worker)
        yield Sample("titan_worker_epoch", "gauge", "Number of its session.", link.status.epoch, worker)
        if link.memory_budget_bytes is not None:
            text = "Memory for experts that it has offered."
            yield Sample("titan_worker_offered_bytes", "gauge", text, link.memory_budget_bytes, worker)
        text = "Bytes of the experts that the plan gives it."
        given = 0 if cluster.plan is None else held_bytes(cluster.plan, position)
        yield Sample("titan_worker_assigned_bytes", "gauge", text, given, worker)
        yield from _traffic(cluster, link.name)


def _traffic(cluster: Cluster, name: str) -> Iterator[Sample]:
    traffic, worker = cluster.exchange.traffic.get(name), {"worker": name}
    if traffic is None:
        return
    yield Sample("titan_remote_calls", "counter", "Calls that a worker answered.", traffic.calls, worker)
    text = "Activations and pairs that went to a worker."
    yield Sample("titan_remote_sent_bytes", "counter", text, traffic.sent_bytes, worker)
    yield Sample("titan_remote_received_bytes", "counter", "Outputs that came back.", traffic.received_bytes, worker)
    text = "Time of a worker's answers, by part."
    for part in ("wire", "queue", "compute", "load"):
        value = getattr(traffic, f"{part}_s")
        yield Sample("titan_remote_seconds", "counter", text, value, worker | {"part": part})
