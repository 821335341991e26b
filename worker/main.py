"""`titan-worker`: parse the command line, load certificates and the model's headers, serve until told to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from titan.common.config.address import normalise_address
from titan.common.console import run_command
from titan.common.errors import ConfigError
from titan.common.log import get_logger, setup_logging
from titan.common.platform import keep_awake, memory_budget_bytes, set_nofile_limit
from titan.common.registry import open_checkpoint
from titan.common.slots import POLICIES
from titan.common.store import CacheMode, ExpertStore, ReaderPool
from titan.common.units import format_bytes, parse_size
from titan.worker.cache import DEFAULT_BYTES, ExpertCache
from titan.worker.engine import MLXThread
from titan.worker.enroll import credentials_or_enrolment
from titan.worker.kept import KeptExperts
from titan.worker.metrics import serve_metrics
from titan.worker.own_copy import READERS, OwnCopy
from titan.worker.server import WorkerServer
from titan.worker.service import WorkerService

log = get_logger("worker")

DEFAULT_LISTEN = "0.0.0.0:7077"
DEFAULT_CERTS = Path("~/.titan/certs")


def serve(
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one.")] = DEFAULT_LISTEN,
    model: Annotated[
        Path | None, typer.Option(help="A copy of the checkpoint. Without one, the coordinator sends the experts.")
    ] = None,
    certs: Annotated[Path, typer.Option(help="Folder with ca.pem and this worker's certificate.")] = DEFAULT_CERTS,
    name: Annotated[str | None, typer.Option(help="Which certificate, when the folder has several.")] = None,
    enroll: Annotated[
        bool | None,
        typer.Option(
            "--enroll/--no-enroll",
            help="Show a one-time code and wait for `titan enroll`; by default when --certs holds no certificate.",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder for experts that were sent here: a restart needs no network, and more than fit in memory are "
            "served."
        ),
    ] = None,
    cache_size: Annotated[str, typer.Option(help="Most bytes of them, of all models.")] = format_bytes(DEFAULT_BYTES),
    lane_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the lanes; 0 takes a free one.")] = 0,
    memory: Annotated[str | None, typer.Option(help="Most bytes of experts to hold, e.g. 8GiB.")] = None,
    policy: Annotated[
        str,
        typer.Option(help="With --model or --cache: eviction from slots that are not pinned: lru, lfu or forecast."),
    ] = "lru",
    reads: Annotated[
        CacheMode,
        typer.Option(
            help="With --model or --cache: read through the page cache, past it, or give its pages back; what --cache "
            "keeps is read through it in any case."
        ),
    ] = CacheMode.PAGE_CACHE,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT for Prometheus' GET /metrics; off by default. Off loopback it is HTTPS, and asks for the "
            "certificate of a coordinator or operator of the cluster."
        ),
    ] = None,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    with_parent: Annotated[
        bool, typer.Option("--with-parent", hidden=True, help="End when the process that started this one ends.")
    ] = False,
) -> None:
    """Hold experts in memory and execute them for a coordinator."""
    setup_logging(log_format, log_level)
    set_nofile_limit()
    address = normalise_address(listen, any_port=True)
    available = memory_budget_bytes()
    budget = parse_size(memory) if memory is not None else available
    if budget > available:
        log.warning(
            "more memory was given than the system can spare",
            given=format_bytes(budget),
            spare=format_bytes(available),
        )
    if policy not in POLICIES:
        raise ConfigError(f"there is no eviction policy {policy!r}", f"Use one of {', '.join(POLICIES)}")
    kept_bytes = parse_size(cache_size)
    if cache is not None and model is not None:
        raise ConfigError("--cache keeps what is sent, and --model has everything", "give one of them")
    own: OwnCopy | None = None
    readers = ReaderPool(READERS)
    if model is not None:
        opened = open_checkpoint(model.expanduser())
        own = OwnCopy(opened.shape, ExpertStore(opened, cache=reads), readers, policy)

    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    if with_parent:
        threading.Thread(target=_follow_parent, args=(os.getppid(), stopping), daemon=True).start()

    found = credentials_or_enrolment(certs.expanduser(), name, address, enroll, stopping, typer.echo)
    if found is None:
        return  # told to stop while it waited
    credentials, address = found

    kept = ExpertCache(cache.expanduser(), kept_bytes) if cache is not None else None
    mlx_thread = MLXThread()
    from_kept = None if kept is None else lambda shape: OwnCopy(shape, KeptExperts(kept, shape, reads), readers, policy)
    service = WorkerService(credentials.identity.name, mlx_thread, budget, own, kept, from_kept)
    server = WorkerServer(service, mlx_thread, credentials, address, lane_port)
    watched = None
    try:
        if metrics is not None:
            watched = serve_metrics(metrics, server, service, own.store if own is not None else None)
    except BaseException:
        server.close()
        raise
    with keep_awake():
        log.info(
            "listening",
            worker=credentials.identity.name,
            address=server.address,
            lane_port=server.lane_port,
            metrics=watched.url if watched is not None else "off",
            memory=format_bytes(budget),
            model=str(model) if model is not None else "experts are sent by the coordinator",
            fingerprint=own.shape.fingerprint[:12] if own is not None else "-",
        )
        stopping.wait()
        server.close()
        if watched is not None:
            watched.close()
        if kept is not None:
            kept.close()
    for number in (signal.SIGTERM, signal.SIGINT):  # told twice: the interpreter's own end takes a moment
        signal.signal(number, signal.SIG_IGN)
    readers.close()
    if own is not None:
        own.store.close()


def _follow_parent(parent: int, stopping: threading.Event) -> None:
    while not stopping.wait(1.0):
        if os.getppid() != parent:
            stopping.set()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(serve)


def main() -> None:
    """Entry point of `titan-worker`."""
    run_command(app, "titan-worker", listen_completed(sys.argv[1:]))


def listen_completed(arguments: list[str]) -> list[str]:
    """`--listen` without an address means the default one: `titan-worker --listen` is all that a worker needs."""
    completed: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        completed.append(argument)
        if argument == "--listen" and following.startswith("-"):
            completed.append(DEFAULT_LISTEN)
    return completed
