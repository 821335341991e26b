"""The maker of random checkpoints: what it makes runs in mlx-lm, and routes as asked."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from fixtures.checkpoint_kinds import KINDS
from fixtures.checkpoints import make_checkpoint
from mlx_lm import generate
from mlx_lm.utils import load

from titan.common.registry import open_checkpoint

TEXT = "Once more unto the breach, dear friends, once more; or close the wall up with our English dead."


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_finite_and_tell_tokens_apart(kinds: dict[str, Path], kind: str) -> None:
    model, tokenizer, *_ = load(str(kinds[kind]))
    model.set_dtype(mx.float32)  # mlx has no bfloat16 gather on the CPU
    logits = model(mx.array([tokenizer.encode(TEXT)]))[0]
    assert mx.isfinite(logits).all()
    assert 1.5 < logits.std().item() < 6
    assert len(set(logits.argmax(-1).tolist())) > 5


def test_it_can_be_served(kinds: dict[str, Path]) -> None:
    model, tokenizer, *_ = load(str(kinds["olmoe"]))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Who art thou?"}], add_generation_prompt=True)
    assert isinstance(generate(model, tokenizer, prompt=prompt, max_tokens=8), str)  # type: ignore[arg-type]


def test_packed_experts_are_as_good_as_quantized_ones(tmp_path: Path) -> None:
    for bits in (3, 4):
        path = make_checkpoint(tmp_path / str(bits), packed=True, bits=bits)
        model: Any = load(str(path))[0]
        linear = model.layers[1].mlp.switch_mlp.down_proj
        weight = mx.dequantize(
            linear.weight, linear.scales, linear.biases, linear.group_size, linear.bits, linear.mode
        ).astype(mx.float32)
        assert weight.std().item() == pytest.approx(4 / 128**0.5, rel=0.1)  # the gain of down_proj
        assert abs(weight.mean().item()) < 0.02


@pytest.mark.parametrize("reuse", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("packed", [False, True])
def test_router_reuse(tmp_path: Path, reuse: float, packed: bool) -> None:
    path = make_checkpoint(
        tmp_path / "m", layers=4, experts=32, top_k=4, hidden=256, width=64, router_reuse=reuse, packed=packed
    )
    model: Any = load(str(path))[0]
    model.set_dtype(mx.float32)
    chosen: list[mx.array] = []
    for layer in model.layers:
        layer.mlp.switch_mlp = Recording(layer.mlp.switch_mlp, chosen)
    tokens = np.random.default_rng(0).integers(0, 2048, 400)
    mx.eval(model(mx.array(tokens[None])))
    shares = []
    for indices in chosen:
        rows = [set(row) for row in np.array(indices).reshape(len(tokens), -1).tolist()]
        shares += [len(a & b) / len(b) for a, b in pairwise(rows)]
    assert np.mean(shares) == pytest.approx(reuse, abs=0.08)


def test_reuse_that_chance_alone_exceeds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outside"):
        make_checkpoint(tmp_path / "m", experts=8, top_k=4, router_reuse=0.25)


def test_shards_and_index(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "m", shards=4))
    sizes = [shard.nbytes for shard in checkpoint.shards]
    assert len(sizes) == 4
    assert max(sizes) < sum(sizes) / 2
    assert (tmp_path / "m" / "model.safetensors.index.json").exists()


class Recording(nn.Module):
    """Passes on to the experts and keeps the indices."""

    def __init__(self, inner: nn.Module, chosen: list[mx.array]) -> None:
        super().__init__()
        self._inner: Any = inner
        self._chosen = chosen

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self._chosen.append(indices)
        return self._inner(x, indices)
