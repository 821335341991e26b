"""`titan registry`: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from titan.common.console import run_command
from titan.common.registry import open_checkpoint
from titan.common.registry.cli import ranges, register


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)  # keeps `registry` a subcommand
    register(app)
    return app


def test_text_for_mixed_quantization(app: typer.Typer, kinds: dict[str, Path]) -> None:
    result = CliRunner().invoke(app, ["registry", str(kinds["mixed"])])
    assert result.exit_code == 0
    assert open_checkpoint(kinds["mixed"]).shape.fingerprint in result.output
    for words in (
        "2 MoE, none dense",
        "8 a layer, top-2",
        "(layers 1), 128 x 64",
        "gate, up: 6-bit affine, group 64, BF16 scales",
        "down: 8-bit affine, group 32, BF16 scales",
        "softmax over all experts, then top-2, scores not renormalised",
        "shards       3",
    ):
        assert words in result.output


def test_text_for_dense_layers(app: typer.Typer, kinds: dict[str, Path]) -> None:
    result = CliRunner().invoke(app, ["registry", str(kinds["qwen3"])])
    assert "5: 1 MoE, 4 dense (0-2, 4)" in result.output
    assert "scores renormalised" in result.output


def test_json(app: typer.Typer, kinds: dict[str, Path]) -> None:
    result = CliRunner().invoke(app, ["registry", str(kinds["mixed"]), "--json"])
    assert result.exit_code == 0
    shown, checkpoint = json.loads(result.output), open_checkpoint(kinds["mixed"])
    assert shown["fingerprint"] == checkpoint.shape.fingerprint
    assert shown["layers"] == {"total": 2, "moe": [0, 1], "dense": []}
    assert shown["experts"]["bytes_total"] == checkpoint.expert_bytes_total
    assert [kind["layers"] for kind in shown["experts"]["kinds"]] == [[0], [1]]
    down = shown["experts"]["kinds"][1]["matrices"][2]
    assert (down["name"], down["bits"], down["group_size"], down["mode"]) == ("down", 8, 32, "affine")
    assert sum(shard["bytes"] for shard in shown["shards"]) == sum(shard.nbytes for shard in checkpoint.shards)


@pytest.mark.parametrize("as_json", [False, True])
def test_refusals(app: typer.Typer, tmp_path: Path, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
    with pytest.raises(SystemExit) as ended:
        run_command(app, "titan", ["registry", str(tmp_path), *(["--json"] if as_json else [])])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    if as_json:
        error = json.loads(shown.out)["error"]
        assert error["code"] == "unsupported_family"
        assert "'qwen3_next'" in error["cause"]
        assert "olmoe, qwen3_moe" in error["mend"]
    else:
        assert shown.out == ""
        assert "'qwen3_next'" in shown.err


def test_ranges_of_numbers() -> None:
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
