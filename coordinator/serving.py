"""Serving: open the model, answer HTTP while workers come and go, end in order. Only wires; knows no command line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from titan.common.config.address import normalise_address, split_address
from titan.common.config.hosts import HostsConfig
from titan.common.errors import EngineFailed
from titan.common.log import get_logger
from titan.common.metrics import CollectorRegistry, Figures, metrics_text
from titan.common.platform import keep_awake
from titan.common.registry import open_checkpoint
from titan.common.security.credentials import Credentials, load_credentials
from titan.common.security.identity import Role, require_role
from titan.coordinator.api import ApiServer, Operations, create_app, read_keys
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.describe import describe_cluster
from titan.coordinator.generation.engine import DEFAULT_MAX_SEQUENCES, Engine
from titan.coordinator.metrics import RequestMetrics, cluster_samples, engine_samples
from titan.coordinator.replan import Replanner
from titan.coordinator.statistics import cluster_stats

log = get_logger("coordinator")

STOP_S = 30.0
PHASE_EVERY_S = 2.0


def run(
    config: HostsConfig,
    options: ClusterOptions,
    *,
    listen: str | None = None,
    max_sequences: int = DEFAULT_MAX_SEQUENCES,
    on_listening: Callable[[ApiServer, Cluster], None] = lambda _server, _cluster: None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        max_sequences: requests that run together at most.
        on_listening: told once the model answers.

    Raises:
        TitanError: the configuration, the checkpoint or the memory does not allow it; the port is taken.
    """
    credentials = cluster_credentials(config)
    key = config.coordinator.api_key_file
    api_keys = read_keys(key) if key is not None else None
    checkpoint = open_checkpoint(config.model)
    cluster = Cluster(config, checkpoint, credentials, options)
    registry = CollectorRegistry()
    engine = Engine(cluster.load, max_sequences=max_sequences, observer=RequestMetrics(registry))
    registry.register(Figures(lambda: engine_samples(engine), lambda: cluster_samples(cluster)))
    replanner = Replanner(cluster, engine.run_between_steps)
    operations = Operations(
        lambda: metrics_text(registry),
        lambda: describe_cluster(cluster),
        replanner.on_request,
        lambda: cluster_stats(cluster),
    )
    cluster.report = _Reporter(engine)
    address = normalise_address(listen, 8080, any_port=True) if listen is not None else config.coordinator.listen
    host, port = split_address(address)
    server = ApiServer(create_app(engine, api_keys=api_keys, listen_host=host, operations=operations), host, port)
    log.info("listening", address=server.address, model=cluster.name, key="needed" if api_keys else "none")
    engine.start()

    def ready(server: ApiServer, cluster: Cluster) -> None:
        if cluster.figures is not None and config.workers:
            replanner.start()
        on_listening(server, cluster)

    watch = threading.Thread(target=_watch_loading, args=(engine, server, cluster, ready), daemon=True)
    watch.start()
    with keep_awake():
        server.run()
        log.info("stopping")
        replanner.close(STOP_S)
        failed = engine.status()
        stopped = engine.stop(STOP_S)
    watch.join(5)
    if failed.state == "failed":
        raise EngineFailed(failed.phase)
    if not stopped:
        raise EngineFailed(f"the engine did not stop within {STOP_S:.0f} s")
    log.info("stopped")


def cluster_credentials(config: HostsConfig) -> Credentials | None:
    """This coordinator's certificate; None when there are no workers to show it to.

    Raises:
        SecurityError: missing, expired, foreign, or of another role.
    """
    if not config.workers:
        return None
    credentials = load_credentials(config.tls.ca, config.tls.cert, config.tls.key)
    require_role(credentials.identity, Role.COORDINATOR)
    return credentials


class _Reporter:
    """Passes loading phases on to /ready, and to the log as often as a reader can follow."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last_s = 0.0
        self._last_kind = ""

    def __call__(self, phase: str) -> None:
        self._engine.report_phase(phase)
        kind = phase.split(":", 1)[0]
        now = time.monotonic()
        if kind != self._last_kind or now - self._last_s >= PHASE_EVERY_S:
            self._last_kind, self._last_s = kind, now
            log.info(phase)


def _watch_loading(
    engine: Engine, server: ApiServer, cluster: Cluster, on_listening: Callable[[ApiServer, Cluster], None]
) -> None:
    """End the server when loading fails; say so when it succeeds."""
    while (state := engine.status().state) == "loading":
        time.sleep(0.05)
    if state == "failed":
        server.stop()
    elif state == "ready":
        log.info(
            "ready", url=f"http://{server.address}/v1", model=cluster.name, context_tokens=cluster.memory.context_tokens
        )
        on_listening(server, cluster)
