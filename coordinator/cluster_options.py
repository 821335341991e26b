"""What the command line adds to hosts.yaml for one run of a cluster. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan.coordinator.generation.model import DEFAULT_PREFILL_STEP_TOKENS
from titan.placement import Plan


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How a cluster is loaded and planned.

    Args:
        name: of the model for clients; empty takes the folder's.
        context: most tokens of prompt and answer; None is the model's own limit, within bounds.
        policy: eviction from the expert cache: lru, lfu, forecast.
        prefetch: off, auto, previous, transition, probe.
        plan: use this one; None makes one.
        measure: plan from measured figures; otherwise by memory alone.
        figures_folder: where figures are kept between starts; None keeps none.
        measure_again: do not use kept figures.
        solve_s: time limit of the solver.
        prompt_cache_bytes: memory for the KV of known prompts; 0 keeps none.
        prompt_cache_folder: where they outlive the process; None for nowhere.
        prompt_cache_disk_bytes: how much of them at most.
        trace: record the router's choices in this file.
    """

    name: str = ""
    context: int | None = None
    prefill_step_tokens: int = DEFAULT_PREFILL_STEP_TOKENS
    policy: str = "lru"
    prefetch: str = "off"
    plan: Plan | None = None
    measure: bool = False
    figures_folder: Path | None = None
    measure_again: bool = False
    solve_s: float = 10.0
    prompt_cache_bytes: int = 0
    prompt_cache_folder: Path | None = None
    prompt_cache_disk_bytes: int = 4 << 30
    trace: Path | None = None
