"""`nodes.yaml`: figures of machines one has or thinks of, for planning without measuring. Knows no model.

coordinator: {memory: 48GiB, compute_us: 90, ssd_us: 5000}
workers:
  - {name: mini, memory: 24GiB, compute_us: 150, round_trip_us: 500, bandwidth: 1.2GB}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from titan.common.config.checked import load_yaml
from titan.common.config.hosts import MAX_WORKERS
from titan.common.units import Size
from titan.placement.values import Node

Microseconds = Annotated[float, Field(ge=0, le=60e6, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[\w.-]+$")]


class _Machine(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    memory: Size
    compute_us: Microseconds
    compute_fixed_us: Microseconds = 0.0
    page_cache_us: Microseconds | None = None
    power_w: Annotated[float, Field(ge=0, le=1e5, allow_inf_nan=False)] | None = None


class Coordinator(_Machine):
    """Node 0. Times are for one expert: `compute_us` a row, `ssd_us` to read it cold, with `readers` at a time."""

    name: Name = "coordinator"
    ssd_us: Microseconds
    readers: Annotated[int, Field(ge=1, le=64)] = 1


class Worker(_Machine):
    """A worker. `bandwidth` is bytes a second on its link; without it the link never limits. `ssd_us`: an expert from
    its own disk, with `readers` at a time; without it the worker has nothing to read from."""

    name: Name
    round_trip_us: Microseconds
    bandwidth: Size | None = None
    ssd_us: Microseconds = 0.0
    readers: Annotated[int, Field(ge=1, le=64)] = 1


class NodesFile(BaseModel):
    """The file. `attention_us` is a layer without its experts, `sync_us` one device-host synchronisation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coordinator: Coordinator
    workers: Annotated[tuple[Worker, ...], Field(max_length=MAX_WORKERS)] = ()
    attention_us: Microseconds | None = None
    sync_us: Microseconds | None = None

    @model_validator(mode="after")
    def _names(self) -> NodesFile:
        names = [self.coordinator.name, *(w.name for w in self.workers)]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"two machines are named {twice[0]}. Give each its own name")
        return self

    def nodes(self) -> tuple[Node, ...]:
        """Placement's nodes, the coordinator first."""
        home = self.coordinator
        return (_node(home, ssd_us=home.ssd_us, readers=home.readers), *(_worker(w) for w in self.workers))


def load_nodes(path: Path) -> NodesFile:
    """Read and check the file. Raises ConfigError naming line and key."""
    return load_yaml(path, NodesFile, missing_mend="Create one, see docs/placement.md")


def _worker(worker: Worker) -> Node:
    return _node(
        worker,
        ssd_us=worker.ssd_us,
        readers=worker.readers,
        round_trip_s=worker.round_trip_us * 1e-6,
        bandwidth_bytes_s=worker.bandwidth,
    )


def _node(machine: Coordinator | Worker, *, ssd_us: float, **more) -> Node:
    return Node(
        machine.name,
        machine.memory,
        machine.compute_us * 1e-6,
        machine.compute_fixed_us * 1e-6,
        ssd_s=ssd_us * 1e-6,
        page_cache_s=None if machine.page_cache_us is None else machine.page_cache_us * 1e-6,
        power_w=machine.power_w,
        **more,
    )
