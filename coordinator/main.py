"""`titan-coordinator`: read hosts.yaml, open the model, serve HTTP while workers come and go. Only wires."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from titan.common.config.address import normalise_address, split_address
from titan.common.config.hosts import HostsConfig, load_hosts
from titan.common.console import run_command
from titan.common.errors import ConfigError, EngineFailed
from titan.common.log import get_logger, setup_logging
from titan.common.metrics import CollectorRegistry, Figures, metrics_text
from titan.common.platform import keep_awake, set_nofile_limit
from titan.common.prefetch.build import PREFETCH
from titan.common.registry import open_checkpoint
from titan.common.security.credentials import Credentials, load_credentials
from titan.common.security.identity import Role, require_role
from titan.common.slots import POLICIES
from titan.common.units import parse_size
from titan.coordinator.api import ApiServer, Operations, create_app, read_keys
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.describe import describe_cluster
from titan.coordinator.generation.engine import DEFAULT_MAX_SEQUENCES, Engine
from titan.coordinator.generation.model import DEFAULT_PREFILL_STEP_TOKENS
from titan.coordinator.metrics import RequestMetrics, cluster_samples, engine_samples
from titan.coordinator.replan import Replanner
from titan.coordinator.statistics import cluster_stats
from titan.placement import Plan

log = get_logger("coordinator")

STOP_S = 30.0
PHASE_EVERY_S = 2.0
MAX_PLAN_FILE_BYTES = 64 << 20
PROMPTS_FOLDER = Path("~/.titan/prompts")
FIGURES_FOLDER = Path("~/.titan/figures")


def serve(
    hosts: Annotated[Path, typer.Option(help="Description of the cluster.")] = Path("hosts.yaml"),
    listen: Annotated[str | None, typer.Option(help="HOST:PORT for HTTP, instead of coordinator.listen.")] = None,
    name: Annotated[str, typer.Option(help="Model name for clients; by default the folder's.")] = "",
    plan: Annotated[Path | None, typer.Option(help="Use this plan instead of making one.")] = None,
    quick_plan: Annotated[
        bool, typer.Option("--quick-plan", help="Plan by memory alone, without measuring nodes and links.")
    ] = False,
    replan: Annotated[bool, typer.Option("--replan", help="Measure again instead of using kept figures.")] = False,
    context: Annotated[
        int | None, typer.Option(min=16, max=1 << 20, help="Most tokens of prompt and answer together.")
    ] = None,
    prefill_step: Annotated[
        int, typer.Option(min=1, max=65536, help="Prompt tokens a forward pass; fewer need less memory.")
    ] = DEFAULT_PREFILL_STEP_TOKENS,
    policy: Annotated[str, typer.Option(help="Eviction from the cache of experts: lru, lfu or forecast.")] = "lru",
    prefetch: Annotated[
        str, typer.Option(help="Read experts ahead of need: off, auto, previous, transition or probe.")
    ] = "off",
    trace: Annotated[
        Path | None, typer.Option(help="Record the router's choices in this file, for `titan simulate` and planning.")
    ] = None,
    parallel: Annotated[
        int, typer.Option(min=1, max=64, help="Requests that decode together at most.")
    ] = DEFAULT_MAX_SEQUENCES,
    prompt_cache: Annotated[str, typer.Option(help="Memory for known prompts; 0B keeps none.")] = "256MiB",
    prompt_cache_disk: Annotated[
        str, typer.Option(help="Disk for known prompts, under ~/.titan/prompts; 0B keeps none.")
    ] = "4GiB",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Serve a model whose experts live on this machine, on workers and on the local SSD."""
    setup_logging(log_format, log_level)
    set_nofile_limit()
    for what, value, known in (("eviction policy", policy, POLICIES), ("prefetch", prefetch, PREFETCH)):
        if value not in known:
            raise ConfigError(f"there is no {what} {value!r}", f"Use one of {', '.join(known)}")
    config = load_hosts(hosts)
    options = ClusterOptions(
        name=name,
        context=context,
        prefill_step_tokens=prefill_step,
        policy=policy,
        prefetch=prefetch,
        plan=_read_plan(plan),
        measure=not quick_plan,
        figures_folder=FIGURES_FOLDER.expanduser(),
        measure_again=replan,
        prompt_cache_bytes=parse_size(prompt_cache, allow_zero=True),
        prompt_cache_folder=PROMPTS_FOLDER.expanduser(),
        prompt_cache_disk_bytes=parse_size(prompt_cache_disk, allow_zero=True),
        trace=trace,
    )
    run(config, options, listen=listen, max_sequences=parallel)


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


def _read_plan(path: Path | None) -> Plan | None:
    if path is None:
        return None
    try:
        if path.stat().st_size > MAX_PLAN_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_PLAN_FILE_BYTES} bytes", "give a plan file")
        return Plan.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the plan {path} cannot be read ({error})", "give a plan file") from error


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(serve)


def main() -> None:
    """Entry point of `titan-coordinator`."""
    run_command(app, "titan-coordinator")
