"""Files that ship with Titan: the service definitions start commands that exist, with options that exist.

Run: .venv/bin/pytest tests/deploy
"""

from __future__ import annotations

import configparser
import plistlib
import tomllib
from pathlib import Path

import pytest
import typer.main

from titan.coordinator.main import app as coordinator_app
from titan.deploy import DEMO_MODEL
from titan.worker.main import app as worker_app

ROOT = Path(__file__).parents[2]
APPS = {"worker": worker_app, "coordinator": coordinator_app}


def options_of(role: str) -> set[str]:
    command = typer.main.get_command(APPS[role])
    return {name for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize("role", APPS)
def test_launchd_and_systemd_start_the_same_command(role: str) -> None:
    plist = plistlib.loads((ROOT / f"deploy/launchd/org.titan.{role}.plist").read_bytes())
    assert plist["Label"] == f"org.titan.{role}"
    used = [a for a in plist["ProgramArguments"] if a.startswith("--")]
    assert set(used) <= options_of(role)
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((ROOT / f"deploy/systemd/titan-{role}.service").read_text())
    command = unit["Service"]["ExecStart"].split()
    assert command[0].endswith(f"/titan-{role}")
    assert [a for a in command if a.startswith("--")] == used
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert f"titan-{role}" in scripts
    # Time to drain before SIGKILL, on both systems.
    assert int(unit["Service"]["TimeoutStopSec"]) == plist["ExitTimeOut"] >= 15


def test_the_demo_checkpoint_is_whole() -> None:
    names = {p.name for p in DEMO_MODEL.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert sum(p.stat().st_size for p in DEMO_MODEL.iterdir()) < 10 << 20
