"""`titan bench hints` on the demo model: it runs, hints are followed, tokens stay; bad options are refused."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from titan.cli import app


def test_it_measures_what_workers_read_with_and_without_hints() -> None:
    options = ["--tokens", "6", "--runs", "1", "--prefetch", "probe:2", "--reads", "page-cache", "--json"]
    result = CliRunner().invoke(app, ["bench", "hints", *options])
    assert result.exit_code == 0, result.output
    off, probe = json.loads(result.stdout.splitlines()[-1])
    assert (off["variant"], probe["variant"]) == ("off", "probe, m = 2")
    assert off["over_off"] == 1
    assert off["identical"]
    assert probe["identical"]
    assert off["hints"] == 0
    assert probe["hints"] > 0
    assert off["loads"] > 0


def test_bad_options_are_named() -> None:
    for variant in ("magic", "off", "probe:0", "probe:x", "probe:99"):
        result = CliRunner().invoke(app, ["bench", "hints", "--prefetch", variant])
        assert result.exit_code != 0
        assert variant in str(result.exception)
