"""`titan bench prompts` on the demo model: it runs, what it counts adds up, bad options are refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from titan.cli import app


def test_it_counts_what_a_prompt_reads() -> None:
    options = ["--slots", "4,12", "--rows", "40", "--layers", "2", "--repeats", "2", "--read-delay", "1ms", "--json"]
    result = CliRunner().invoke(app, ["bench", "prompts", *options])
    assert result.exit_code == 0, result.output
    few, more = json.loads(result.stdout.splitlines()[-1])
    for row in (few, more):
        assert row["identical"]
        assert row["loads"] == 32 - row["slots"]
        assert row["stall_ms"] <= row["layer_ms"]
        assert row["reads_ms"] >= row["loads"] / 5  # four readers and the thread that waits


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slots", "33"], "1..32"),
        (["--rows", "many"], "'many'"),
        (["--reads", "fast"], "'fast'"),
        (["--read-delay", "2m"], "'2m'"),
    ],
)
def test_bad_options_are_named(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "prompts", *options])
    assert result.exit_code != 0
    assert words in str(result.exception)
