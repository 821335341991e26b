"""How often experts were used survives a restart, for the same model, weighed so that new text counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fixtures.checkpoints import make_checkpoint

from titan.common.experts import ExpertLayer
from titan.common.prefetch.uses import MAX_USES, recall_uses, remember_uses
from titan.common.registry import open_checkpoint
from titan.common.slots.buffers import LayerBuffers


@pytest.fixture
def layers(tmp_path: Path) -> list[ExpertLayer]:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model", hidden=64, width=64))
    return [ExpertLayer(LayerBuffers(spec, 2, "float32"), _no_fill) for spec in checkpoint.shape.layers]


def test_uses_survive_a_restart(tmp_path: Path, layers: list[ExpertLayer]) -> None:
    path = tmp_path / "uses.npz"
    assert not remember_uses(path, "f" * 64, 8, layers)
    assert not recall_uses(path, "f" * 64, 8, layers)
    layers[0].table.uses.update({1: 4 * MAX_USES, 2: 8})
    layers[1].table.uses.update({7: 3})
    assert remember_uses(path, "f" * 64, 8, layers)
    for layer in layers:
        layer.table.uses.clear()
    assert not recall_uses(path, "0" * 64, 8, layers)
    assert not recall_uses(path, "f" * 64, 9, layers)
    assert recall_uses(path, "f" * 64, 8, layers)
    assert dict(layers[0].table.uses) == {1: MAX_USES, 2: 2}
    assert dict(layers[1].table.uses) == {7: 3}
    path.write_bytes(path.read_bytes()[:-40])
    assert not recall_uses(path, "f" * 64, 8, layers)


def _no_fill(_layer: int, _expert: int, _targets: Sequence[object]) -> None:
    raise AssertionError("nothing is read here")
