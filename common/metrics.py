"""Figures for Prometheus: a registry of one's own, collectors out of functions, text out. Knows no figure by name.

A daemon that serves no HTTP of its own can expose the text with `serve_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["CONTENT_TYPE", "CollectorRegistry", "Figures", "Sample", "metrics_text", "serve_metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure now.

    Args:
        name: by Prometheus' conventions, with its unit; a counter's without `_total`.
        kind: "counter" only grows; "gauge" may fall.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: float
    labels: Mapping[str, str] | None = None


class Figures:
    """A collector that asks functions for their samples whenever Prometheus asks. Register it with a registry."""

    def __init__(self, *sources: Callable[[], Iterable[Sample]]) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for source in self._sources:
            for sample in source():
                labels = sample.labels or {}
                family = families.get(sample.name)
                if family is None:
                    make = CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
                    family = families[sample.name] = make(sample.name, sample.help, labels=list(labels))
                family.add_metric(list(labels.values()), sample.value)
        return families.values()

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before it is asked for."""
        return ()


def metrics_text(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None]:
    """Serve /metrics on a thread of its own; returns what stops it.

    Raises:
        OSError: the address cannot be listened on.
    """
    server, thread = start_http_server(port, host, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
