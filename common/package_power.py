"""Package power under a load (P_n of the formulation), where the system tells: RAPL on Linux, powermetrics on macOS.

Asks for no password and changes nothing: what is not permitted is not known. Knows nothing of the load.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from titan.common.network import Run, run_quietly

__all__ = ["package_power_w", "powermetrics_watts"]

POWERCAP = Path("/sys/class/powercap")
SAMPLE_S = 1.0
POWERMETRICS = ("powermetrics", "--samplers", "cpu_power,gpu_power", "-i", str(int(SAMPLE_S * 1e3)), "-n", "1")


def package_power_w(
    load: Callable[[], object],
    *,
    platform: str = sys.platform,
    powercap: Path = POWERCAP,
    run: Run = run_quietly,
    is_root: bool | None = None,
) -> float | None:
    """Mean watts of this machine's processors while `load` is run again and again for about a second.

    None, at once and without a load, where the system does not tell: no RAPL counters that may be read, not root and
    no `sudo -n` for powermetrics.
    """
    if platform == "darwin":
        return _by_powermetrics(load, run, os.geteuid() == 0 if is_root is None else is_root)
    counters = _packages(powercap)
    before = [_energy_uj(zone) for zone in counters]
    if not counters or None in before:
        return None
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < SAMPLE_S:
        load()
    joules = 0.0
    for zone, first in zip(counters, before, strict=True):
        last = _energy_uj(zone)
        if first is None or last is None:
            return None
        if last < first:  # the counter has wrapped
            last += _number(zone / "max_energy_range_uj") or 0
        joules += max(0, last - first) / 1e6
    return joules / spent if spent > 0 else None


def powermetrics_watts(output: str) -> float | None:
    """Watts in what `powermetrics --samplers cpu_power,gpu_power` says; None when it says none.

    On Apple silicon `Combined Power (CPU + GPU + ANE): 1290 mW`, or the parts by themselves in older versions; on
    Intel `Intel energy model derived package power (CPUs+GT+SA): 3.45W`.
    """
    if (found := re.search(r"^Combined Power \([^)\n]{1,64}\):\s+(\d{1,9})\s*mW", output, re.MULTILINE)) is not None:
        return int(found[1]) / 1e3
    parts = re.findall(r"^(?:CPU|GPU|ANE) Power:\s+(\d{1,9})\s*mW", output, re.MULTILINE)
    if parts:
        return sum(int(part) for part in parts) / 1e3
    found = re.search(r"derived package power \([^)\n]{1,64}\):\s+(\d{1,6}(?:\.\d{1,6})?)\s*W", output)
    return float(found[1]) if found is not None else None


def _by_powermetrics(load: Callable[[], object], run: Run, is_root: bool) -> float | None:
    if not is_root and run(["sudo", "-n", "true"]) is None:
        return None
    said: list[str | None] = []
    command = [*POWERMETRICS] if is_root else ["sudo", "-n", *POWERMETRICS]
    sampler = threading.Thread(target=lambda: said.append(run(command)), name="titan-powermetrics", daemon=True)
    sampler.start()
    while sampler.is_alive():  # `run` ends in time
        load()
    sampler.join()
    return powermetrics_watts(said[0]) if said and said[0] is not None else None


def _packages(powercap: Path) -> list[Path]:
    """Zones of whole packages; those of cores, memory and the whole board (psys) would count twice."""
    return [
        zone
        for zone in sorted(powercap.glob("intel-rapl:*"))
        if zone.name.count(":") == 1 and _text(zone / "name").startswith("package-")
    ]


def _energy_uj(zone: Path) -> int | None:
    return _number(zone / "energy_uj")


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):  # absent, or for root alone
        return ""
