"""Execution on slots against mlx-lm's SwitchGLU: any assignment of experts to slots gives the same bits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint
from mlx_lm.utils import load_model

from titan.common.execution import apply_pairs, apply_rows
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import ExpertStore

EXPERTS, TOP_K, HIDDEN = 8, 3, 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("execution") / "model"
    return open_checkpoint(
        make_checkpoint(path, family="qwen3_moe", experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, width=96, group_size=32)
    )


@pytest.mark.parametrize("rows", [1, 5, 22])
def test_any_assignment_of_slots_gives_the_same_bits(checkpoint: Checkpoint, rows: int) -> None:
    module: Any
    module, _ = load_model(checkpoint.path, lazy=True, model_config=dict(checkpoint.config_defaults))
    module.set_dtype(mx.float32)
    random = np.random.default_rng(rows)
    x = mx.array(random.standard_normal((rows, HIDDEN), dtype=np.float32))
    experts = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.uint32)
    slot_of = random.permutation(EXPERTS + 2)[:EXPERTS].astype(np.uint32)
    buffers = LayerBuffers(checkpoint.shape.layer(0), EXPERTS + 2, "float32")
    store = ExpertStore(checkpoint)
    for expert, slot in enumerate(slot_of):
        store.read_expert(0, expert, buffers.targets(int(slot)))
    reference = np.array(module.model.layers[0].mlp.switch_mlp(x, mx.array(experts)))
    np.testing.assert_array_equal(np.array(apply_rows(buffers, x, mx.array(slot_of[experts]))), reference)
    order = random.permutation(experts.size)
    row_of = np.repeat(np.arange(rows, dtype=np.uint32), TOP_K)[order]
    pairs = apply_pairs(buffers, x, row_of, slot_of[experts.reshape(-1)[order]], sort=experts.size >= 64)
    np.testing.assert_array_equal(np.array(pairs), reference.reshape(-1, HIDDEN)[order])
    store.close()
