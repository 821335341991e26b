"""Whether this machine will fall asleep by itself. Changes nothing: common.platform.keep_awake holds sleep off."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from titan.common.network import Run, run_quietly


@dataclass(frozen=True, slots=True)
class SleepSetting:
    """What the system would do when nobody touches it.

    Args:
        sleeps: it would fall asleep, or may.
        words: what was found, for people.
    """

    sleeps: bool
    words: str


def sleep_setting(
    *, platform: str = sys.platform, run: Run = run_quietly, power_supply: Path = Path("/sys/class/power_supply")
) -> SleepSetting | None:
    """The setting in force; None when the system does not say."""
    if platform == "darwin":
        return _macos(run(["pmset", "-g"]))
    state = (run(["systemctl", "show", "-p", "LoadState", "--value", "sleep.target"]) or "").strip()
    if not state:
        return SleepSetting(False, "nothing here puts the machine to sleep (no systemd)")
    if state == "masked":
        return SleepSetting(False, "sleep.target is masked")
    if any(power_supply.glob("BAT*")):
        return SleepSetting(True, "a machine with a battery, whose desktop or lid may suspend it")
    return SleepSetting(False, "a machine without a battery")


def _macos(output: str | None) -> SleepSetting | None:
    """From `pmset -g`: ` sleep                10 (sleep prevented by caffeinate)`; minutes, 0 is never."""
    found = re.search(r"^\s*sleep\s+(\d{1,6})\b(.*)$", output or "", re.MULTILINE)
    if found is None:
        return None
    minutes = int(found[1])
    held = " (held off now)" if "prevented" in found[2] else ""
    if minutes == 0:
        return SleepSetting(False, "sleep is off")
    return SleepSetting(True, f"sleeps after {minutes} min without use{held}")
