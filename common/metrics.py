"""Figures for Prometheus: a registry of one's own, collectors out of functions, text out. Knows no figure by name.

A daemon that serves no HTTP of its own exposes the text with `titan.common.metrics_server`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["CONTENT_TYPE", "CollectorRegistry", "Figures", "Sample", "Tally", "metrics_text"]

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


class Tally:
    """Counts by labels, each of which has few values. Thread-safe.

    Args:
        labels: their names, in the order in which `add` takes the values.
    """

    def __init__(self, *labels: str) -> None:
        self._labels = labels
        self._counts: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()

    @property
    def total(self) -> float:
        with self._lock:
            return sum(self._counts.values())

    def add(self, *values: str, by: float = 1) -> None:
        with self._lock:
            self._counts[values] = self._counts.get(values, 0) + by

    def of(self, *values: str) -> float:
        return self._counts.get(values, 0)

    def samples(self, name: str, help: str) -> list[Sample]:
        with self._lock:
            counts = dict(self._counts)
        return [Sample(name, "counter", help, n, dict(zip(self._labels, v, strict=True))) for v, n in counts.items()]


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
