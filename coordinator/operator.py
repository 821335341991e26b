"""A cluster for an operator's command: greeted and measured on the calling thread, not serving, always closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.common.config.hosts import load_hosts
from titan.common.registry import open_checkpoint
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.main import FIGURES_FOLDER
from titan.coordinator.serving import cluster_credentials


@contextmanager
def cluster_of(hosts: Path, *, measure_again: bool, report: Callable[[str], None]) -> Iterator[Cluster]:
    """The cluster of a hosts.yaml, ready to be measured and planned for.

    Raises:
        TitanError: hosts.yaml, certificate or checkpoint do not allow it.
    """
    config = load_hosts(hosts)
    credentials = cluster_credentials(config)
    options = ClusterOptions(measure=True, figures_folder=FIGURES_FOLDER.expanduser(), measure_again=measure_again)
    cluster = Cluster(config, open_checkpoint(config.model), credentials, options, report)
    try:
        cluster.workers.greet()
        yield cluster
    finally:
        cluster.close()
