"""`titan pack` as it is run, and what a pack is for: the same tokens as the checkpoint it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.checkpoints import make_checkpoint
from typer.testing import CliRunner

from titan.cli import app
from titan.common.registry import open_checkpoint
from titan.coordinator.bench.alone import greedy_tokens
from titan.coordinator.bench.local import load_alone
from titan.deploy import DEMO_MODEL


@pytest.mark.parametrize("family", ["demo", "qwen3_moe"])
def test_a_pack_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    source = DEMO_MODEL
    if family != "demo":
        source = make_checkpoint(tmp_path / "model", family=family, layers=3, mlp_only_layers=[0], dtype="float16")
    result = CliRunner().invoke(app, ["pack", str(source), str(tmp_path / "pack"), "--verify"])
    assert result.exit_code == 0, result.output
    assert "have the checksums they were packed with" in result.output
    answers = []
    for path in (source, tmp_path / "pack"):
        checkpoint = open_checkpoint(path)
        cluster, loaded = load_alone(checkpoint, checkpoint.expert_bytes_total)
        answers.append((checkpoint.shape.fingerprint, greedy_tokens(loaded, [5, 6, 7], 24)))
        assert not all(layer.whole for layer in cluster.layers.values())
        loaded.close()
    assert answers[0] == answers[1]


def test_a_pack_without_a_destination_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pack", str(tmp_path)])
    assert result.exit_code != 0
    assert "needs a destination" in str(result.exception)
