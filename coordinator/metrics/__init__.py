"""What the coordinator tells Prometheus."""

from titan.coordinator.metrics.cluster import cluster_samples
from titan.coordinator.metrics.engine import engine_samples
from titan.coordinator.metrics.requests import RequestMetrics

__all__ = ["RequestMetrics", "cluster_samples", "engine_samples"]
