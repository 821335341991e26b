"""`titan-coordinator`: its command line and hosts.yaml, checked before anything that needs mlx-lm is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from titan.common.config.hosts import load_hosts
from titan.common.console import run_command
from titan.common.errors import ConfigError
from titan.common.log import setup_logging
from titan.common.platform import set_nofile_limit
from titan.common.prefetch.build import PREFETCH
from titan.common.slots import POLICIES
from titan.common.units import parse_size
from titan.coordinator.defaults import DEFAULT_MAX_SEQUENCES, DEFAULT_PREFILL_STEP_TOKENS
from titan.placement import Plan

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
    given = _read_plan(plan)
    prompt_cache_bytes = parse_size(prompt_cache, allow_zero=True)
    prompt_cache_disk_bytes = parse_size(prompt_cache_disk, allow_zero=True)

    from titan.coordinator.cluster_options import ClusterOptions  # seconds: what is wrong is said first
    from titan.coordinator.serving import run

    options = ClusterOptions(
        name=name,
        context=context,
        prefill_step_tokens=prefill_step,
        policy=policy,
        prefetch=prefetch,
        plan=given,
        measure=not quick_plan,
        figures_folder=FIGURES_FOLDER.expanduser(),
        measure_again=replan,
        prompt_cache_bytes=prompt_cache_bytes,
        prompt_cache_folder=PROMPTS_FOLDER.expanduser(),
        prompt_cache_disk_bytes=prompt_cache_disk_bytes,
        trace=trace,
    )
    run(config, options, listen=listen, max_sequences=parallel)


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
