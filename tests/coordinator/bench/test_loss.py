"""`titan bench loss` on the demo model: workers are lost, tokens stay. Run: .venv/bin/pytest tests/coordinator/bench"""

from __future__ import annotations

import json

from typer.testing import CliRunner

from titan.cli import app


def test_it_loses_a_worker_each_way_and_keeps_the_tokens() -> None:
    result = CliRunner().invoke(app, ["bench", "loss", "--tokens", "24", "--runs", "1", "--json"])
    assert result.exit_code == 0, result.output
    killed, stopped = json.loads(result.stdout.splitlines()[-1])
    assert (killed["fault"], stopped["fault"]) == ("killed", "stopped")
    for figures in (killed, stopped):
        assert figures["identical"]
        assert figures["next_over_alone"] > 0
        assert figures["fault_ms"] <= figures["longest_ms"]
