"""`titan bench ssd` on the demo model: it runs, what it counts agrees with the simulator, bad options are refused."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from titan.cli import app


def run(*options: str) -> dict:
    result = CliRunner().invoke(app, ["bench", "ssd", "--tokens", "8", "--warm", "8", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_it_counts_what_the_simulator_predicts() -> None:
    figures = run("--slots", "8", "--features", "packed,forecast")
    assert {row["how"] for row in figures["install"]} >= {"bare preadv, page-cache", "packed into a slot, page-cache"}
    rows = figures["decode"]
    assert [row["variant"]["policy"] for row in rows] == ["lru", "lru", "forecast"]
    for row in rows:
        assert row["identical"]
        assert abs(row["hit_rate"] - row["simulated_hit_rate"]) < 1e-9
        assert row["hit_rate"] <= row["belady_hit_rate"]
        assert row["loads"] > 0
        assert len(row["layers"]) == 8


def test_bad_options_are_named() -> None:
    for options, words in ((["--slots", "3"], "4..32"), (["--features", "magic"], "'magic'")):
        result = CliRunner().invoke(app, ["bench", "ssd", *options])
        assert result.exit_code != 0
        assert words in str(result.exception)
