"""Package power from a made-up RAPL tree and from powermetrics' words.

Run: .venv/bin/pytest tests/common/test_package_power.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from titan.common.package_power import package_power_w, powermetrics_watts

APPLE = """Machine model: Mac14,6
*** Sampled system activity (Mon Nov 30 12:00:00 2026 +0100) (1003.25ms elapsed) ***

**** Processor usage ****

E-Cluster Online: 100%
E-Cluster HW active frequency: 1020 MHz
CPU 0 frequency: 1135 MHz
CPU Power: 14210 mW
GPU Power: 21034 mW
ANE Power: 0 mW
Combined Power (CPU + GPU + ANE): 35244 mW

**** GPU usage ****
GPU HW active frequency: 1398 MHz
GPU Power: 21034 mW
"""
OLDER = "CPU Power: 5000 mW\nGPU Power: 7000 mW\nANE Power: 10 mW\n"
INTEL = "**** Processor usage ****\n\nIntel energy model derived package power (CPUs+GT+SA): 3.45W\n"


def rapl(root: Path, **zones: tuple[str, int]) -> Path:
    for zone, (name, energy) in zones.items():
        folder = root / zone.replace("_", ":").replace("intel:rapl", "intel-rapl")
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(f"{energy}\n")
        (folder / "max_energy_range_uj").write_text("262143328850\n")
    return root


def test_packages_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    root = rapl(
        tmp_path,
        intel_rapl_0=("package-0", 262_143_000_000),
        intel_rapl_1=("package-1", 1_000),
        intel_rapl_0_0=("core", 5),
        intel_rapl_2=("psys", 7),
    )
    runs = 0

    def load() -> None:
        nonlocal runs
        runs += 1
        (root / "intel-rapl:0" / "energy_uj").write_text("9671150\n")  # wrapped: 10 J
        (root / "intel-rapl:1" / "energy_uj").write_text("20001000\n")  # 20 J
        (root / "intel-rapl:0:0" / "energy_uj").write_text("99000000\n")

    watts = package_power_w(load, platform="linux", powercap=root)
    assert runs > 1
    assert watts == pytest.approx(30, rel=0.2)


@pytest.mark.parametrize("text", ["", "-5", "much", "9" * 40])
def test_counters_that_cannot_be_read_are_no_power(tmp_path: Path, text: str) -> None:
    root = rapl(tmp_path, intel_rapl_0=("package-0", 5))
    (root / "intel-rapl:0" / "energy_uj").write_text(text)
    assert package_power_w(lambda: pytest.fail("no load is needed"), platform="linux", powercap=root) is None
    assert package_power_w(lambda: None, platform="linux", powercap=tmp_path / "none") is None


def test_powermetrics_words() -> None:
    assert powermetrics_watts(APPLE) == pytest.approx(35.244)
    assert powermetrics_watts(OLDER) == pytest.approx(12.01)
    assert powermetrics_watts(INTEL) == pytest.approx(3.45)
    assert powermetrics_watts("CPU 0 frequency: 1135 MHz\n") is None


@pytest.mark.parametrize(("is_root", "permitted"), [(True, True), (False, True), (False, False)])
def test_powermetrics_is_asked_only_where_it_is_permitted(is_root: bool, permitted: bool) -> None:
    asked: list[list[str]] = []

    def run(command: list[str]) -> str | None:
        asked.append(command)
        if command == ["sudo", "-n", "true"]:
            return "" if permitted else None
        return APPLE

    watts = package_power_w(lambda: None, platform="darwin", run=run, is_root=is_root)
    assert watts == (pytest.approx(35.244) if permitted else None)
    programs = [next(word for word in command if word not in ("sudo", "-n")) for command in asked]
    assert programs == (["powermetrics"] if is_root else ["true", "powermetrics"] if permitted else ["true"])
