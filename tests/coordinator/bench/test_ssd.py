"""`titan bench ssd` on the demo model: it runs, what it counts agrees with the simulator, bad options are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from titan.cli import app
from titan.coordinator.bench.ssd_routing import drawn_routing, reuse_of, simulated_misses


def run(*options: str) -> dict:
    result = CliRunner().invoke(app, ["bench", "ssd", "--tokens", "8", "--warm", "8", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_it_counts_what_the_simulator_predicts() -> None:
    options = ("--slots", "5", "--features", "unpacked-page-cache,forecast,probe", "--read-delay", "200us")
    figures = run(*options, "--reuse", "0.5")
    assert {row["how"] for row in figures["install"]} >= {"bare preadv, page-cache", "packed into a slot, page-cache"}
    plain, slower, drawn = figures["decode"].values()
    assert [row["variant"]["policy"] for row in plain] == ["lru", "lru", "forecast", "lru"]
    assert [row["variant"]["packed"] for row in plain] == [True, False, True, True]
    for row in (*plain, *slower, *drawn):
        assert row["identical"]
        assert row["tokens"] == 8
        assert len(row["layers"]) == 8
        if row["variant"]["prefetch"] == "off":
            assert row["hit_rate"] == pytest.approx(row["simulated_hit_rate"], abs=1e-9)
            assert row["hit_rate"] <= row["belady_hit_rate"]
    assert all(row["fetch_ms"] > 0.2 for row in slower)
    assert slower[0]["stall_ms"] >= 0.2 * slower[0]["loads"] > 0
    assert drawn[0]["loads"] > 0
    assert 0.3 < drawn[0]["reuse"] < 0.7
    assert drawn[0]["hit_rate"] != plain[0]["hit_rate"]


def test_drawn_experts_come_again_as_often_as_asked() -> None:
    for reuse in (0.0, 0.5, 1.0):
        ids = drawn_routing(200, 2, 16, 4, reuse)
        assert all(len(set(row)) == 4 for row in ids.reshape(-1, 4).tolist())
        assert reuse_of(ids) == pytest.approx(reuse, abs=0.05)
        lru = simulated_misses(ids, 4, "lru", 16)  # C = K: what the token before did not choose
        assert 1 - lru[1:].mean() / 4 == pytest.approx(reuse_of(ids))
        assert np.all(
            simulated_misses(ids, 8, "belady", 16).sum(axis=0) <= simulated_misses(ids, 8, "lru", 16).sum(axis=0)
        )


def test_bad_options_are_named() -> None:
    for options, words in (
        (["--slots", "3"], "4..32"),
        (["--features", "magic"], "'magic'"),
        (["--reuse", "0.5,2"], "'0.5,2'"),
        (["--read-delay", "2s"], "'2s'"),
    ):
        result = CliRunner().invoke(app, ["bench", "ssd", *options])
        assert result.exit_code != 0
        assert words in str(result.exception)
