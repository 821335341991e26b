"""This machine: memory, open files, sleep, the disk under the model, MLX's device, the port of the HTTP API."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan.common.config.address import split_address
from titan.common.network import Listener, listener_on
from titan.common.platform import (
    drop_cached,
    memory_budget_bytes,
    open_for_reading,
    set_nofile_limit,
    total_memory_bytes,
)
from titan.common.power import SleepSetting, sleep_setting
from titan.common.units import format_bytes, format_seconds
from titan.coordinator.doctor.finding import Finding

READ_BYTES = 256 << 20
READ_S = 1.0
BLOCK_BYTES = 4 << 20
SLOW_BYTES_PER_S = 500e6  # a SATA SSD; Macs read several times as fast
ENOUGH_FILES = 1024
MACHINE = "this machine"


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """A short sequential read of one file, past the page cache as far as the system lets one."""

    path: Path
    read_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.read_bytes / max(self.seconds, 1e-9)


def check_memory(
    wanted_bytes: int | None,
    *,
    budget: Callable[[], int] = memory_budget_bytes,
    total: Callable[[], int] = total_memory_bytes,
) -> Finding:
    """Whether `coordinator.memory` of hosts.yaml can be had now."""
    spare = budget()
    text = f"{format_bytes(spare)} of {format_bytes(total())} can be spared for experts"
    if wanted_bytes is not None and wanted_bytes > spare:
        mend = "Lower `coordinator.memory`, or end what uses the memory"
        return Finding("memory", MACHINE, "warn", f"hosts.yaml wants {format_bytes(wanted_bytes)}, {text}", mend)
    if spare == 0:
        return Finding("memory", MACHINE, "fail", text, "End what uses the memory")
    return Finding("memory", MACHINE, "ok", text)


def check_open_files(*, limit: Callable[[], int] = set_nofile_limit) -> Finding:
    """What the daemons will raise their limit to."""
    files = limit()
    if files >= ENOUGH_FILES:
        return Finding("open files", MACHINE, "ok", f"{files} may be open")
    return Finding("open files", MACHINE, "warn", f"only {files} may be open", f"Run `ulimit -n {ENOUGH_FILES}` before")


def check_sleep(*, setting: Callable[[], SleepSetting | None] = sleep_setting, platform: str = sys.platform) -> Finding:
    found = setting()
    if found is None:
        return Finding("sleep", MACHINE, "warn", "the system does not say whether it sleeps", "Look at its settings")
    if not found.sleeps:
        return Finding("sleep", MACHINE, "ok", found.words)
    if platform == "darwin":
        text = f"{found.words}; Titan holds that off while it serves, but not with the lid closed"
        return Finding("sleep", MACHINE, "warn", text, "Run `sudo pmset -c sleep 0`, and leave the lid open")
    return Finding("sleep", MACHINE, "warn", found.words, "Run `sudo systemctl mask sleep.target suspend.target`")


def check_device() -> tuple[Finding, str]:
    """MLX's device, and its kind as workers state theirs."""
    import mlx.core as mx  # only here: the other checks must not pay for loading MLX

    kind = str(mx.default_device().type).rpartition(".")[2]
    if kind == "gpu":
        return Finding("device", MACHINE, "ok", f"MLX computes on the GPU ({kind})"), kind
    mend = "" if sys.platform != "darwin" else "Use a Mac with Apple silicon, and a Python built for arm64"
    level = "ok" if sys.platform != "darwin" else "warn"
    return Finding("device", MACHINE, level, f"MLX computes on the processor ({kind}), which is slow", mend), kind


def check_port(address: str, *, listener: Callable[[int], Listener | None] = listener_on) -> Finding:
    """Who holds the port of the HTTP API: nobody, a coordinator that runs, or somebody else."""
    _, port = split_address(address)
    holder = listener(port) if port else None
    if holder is None:
        return Finding("port", address, "ok", "nothing listens there yet")
    who = f"{holder.name or 'a program'} (pid {holder.pid})" if holder.pid else "a program of somebody else"
    mend = "Fine when that is your coordinator; otherwise stop it, or change coordinator.listen"
    return Finding("port", address, "warn", f"{who} listens there", mend)


def check_disk(model: Path, *, measure: Callable[[Path], DiskSpeed | None] | None = None) -> Finding:
    """Whether the disk under the model reads fast enough to stream experts."""
    try:
        speed = (measure or measure_disk)(model)
    except OSError as error:
        text = f"cannot be read ({error.strerror or error})"
        return Finding("disk", str(model), "fail", text, "Check `model` in hosts.yaml")
    if speed is None:
        text = "holds no safetensors file"
        return Finding("disk", str(model), "fail", text, "Check `model` in hosts.yaml, or fetch the checkpoint")
    rate = f"{speed.bytes_per_s / 1e6:.0f} MB/s"
    took = f"{format_bytes(speed.read_bytes)} in {format_seconds(speed.seconds)}"
    if speed.bytes_per_s < SLOW_BYTES_PER_S:
        text = f"{rate} ({took}): experts that no memory holds will make tokens wait"
        return Finding("disk", str(model), "warn", text, "Move the model to an internal SSD")
    return Finding("disk", str(model), "ok", f"{rate} ({took})")


def measure_disk(model: Path, *, most_bytes: int = READ_BYTES, most_s: float = READ_S) -> DiskSpeed | None:
    """Read the largest safetensors file of a checkpoint, at most so much and so long; None when there is none.

    Raises:
        OSError: the folder or the file cannot be read.
    """
    files = [path for path in model.iterdir() if path.suffix == ".safetensors" and path.is_file()]
    if not files:
        return None
    largest = max(files, key=lambda path: path.stat().st_size)
    size = min(largest.stat().st_size, most_bytes)
    buffer = memoryview(bytearray(BLOCK_BYTES))
    fd = open_for_reading(largest, bypass_cache=True)
    try:
        drop_cached(fd, 0, size)
        start = time.monotonic()
        done = 0
        while done < size and time.monotonic() - start < most_s:
            count = os.preadv(fd, [buffer[: min(BLOCK_BYTES, size - done)]], done)
            if count == 0:
                break
            done += count
        seconds = time.monotonic() - start
    finally:
        os.close(fd)
    return DiskSpeed(largest, done, seconds) if done else None
