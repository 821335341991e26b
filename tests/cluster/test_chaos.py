"""Things go wrong in a random order that a seed repeats; the tokens stay mlx-lm's and nothing is left over.

The run is a process: in network namespaces of its own where the system permits them, else on loopback addresses.
Run: .venv/bin/pytest tests/cluster/test_chaos.py
More steps: .venv/bin/python tests/fixtures/chaos.py --place namespaces --seed 1 --steps 1000
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.namespaces import why_not

SCRIPT = Path(__file__).parents[1] / "fixtures" / "chaos.py"
STEPS = 24
DEADLINE_S = 280


FORBIDDEN = why_not()


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("namespaces", marks=pytest.mark.skipif(bool(FORBIDDEN), reason=FORBIDDEN)),
        pytest.param("loopback", marks=pytest.mark.skipif(not FORBIDDEN, reason="runs in namespaces instead")),
    ],
)
def test_nothing_breaks_whatever_breaks(place: str) -> None:
    command = [sys.executable, str(SCRIPT), "--place", place, "--steps", str(STEPS), "--seed", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["violations"] == []
    assert len(result["done"]) > 12
    executed = result["executed"]
    assert all(executed[f"worker-{number}"] > 0 for number in (1, 2, 3)), executed
    assert executed["fallbacks"] > 0
    if place == "namespaces":
        assert result["done"].keys() >= {"pull", "plug", "fill", "fill of the coordinator", "no clock here"}
