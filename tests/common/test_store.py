"""The store against mx.load: the same bytes at any offset, exact widening, and named errors for files that change."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint

from titan.common.arrays import DISK_DTYPES, raw_bits, widen
from titan.common.errors import CheckpointChanged, StoreError
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import CacheMode, ExpertStore


def expected(checkpoint: Checkpoint, layer: int, expert: int) -> list[np.ndarray]:
    """One expert's components as MLX loads them, raw bits."""
    tensors: dict[str, mx.array] = {}
    for shard in checkpoint.shards:
        loaded = mx.load(str(shard.path))
        assert isinstance(loaded, dict)
        tensors.update(loaded)
    spec = checkpoint.shape.layer(layer)
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    found = []
    for matrix in spec.matrices:
        for component in matrix.components:
            stacked = f"{spec.module_path}.{names[matrix.name]}.{component.name}"
            if stacked in tensors:
                found.append(raw_bits(tensors[stacked])[expert])
            else:
                single = spec.module_path.replace("switch_mlp", f"experts.{expert}")
                found.append(raw_bits(tensors[f"{single}.{names[matrix.name]}.{component.name}"]))
    return found


def raw_targets(checkpoint: Checkpoint, layer: int) -> list[np.ndarray]:
    return [
        np.zeros(c.shape, DISK_DTYPES[c.dtype][0])
        for matrix in checkpoint.shape.layer(layer).matrices
        for c in matrix.components
    ]


@pytest.mark.parametrize("cache", list(CacheMode))
@pytest.mark.parametrize(
    ("padding", "layout", "dtype", "bits"),
    [
        (0, "stacked", "bfloat16", 4),
        (1, "stacked", "float16", 8),
        (3, "per-expert", "bfloat16", 4),
        (7, "stacked", "float32", None),
    ],
)
def test_reads_what_mlx_loads_at_any_offset(
    tmp_path: Path, padding: int, layout: str, dtype: str, bits: int | None, cache: CacheMode
) -> None:
    path = make_checkpoint(tmp_path / "model", layout=layout, dtype=dtype, bits=bits, header_padding=padding, shards=2)
    checkpoint = open_checkpoint(path)
    store = ExpertStore(checkpoint, cache=cache)
    for layer, expert in ((0, 0), (1, 7), (0, 3)):
        targets = raw_targets(checkpoint, layer)
        store.read_expert(layer, expert, targets)
        for target, bytes_ in zip(targets, expected(checkpoint, layer, expert), strict=True):
            np.testing.assert_array_equal(target.view(bytes_.dtype), bytes_)
        assert bytes(store.read_bytes(layer, expert)) == b"".join(t.tobytes() for t in targets)
    assert store.counts.experts == 6
    assert store.counts.bytes == 6 * checkpoint.shape.layers[0].expert_bytes
    store.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widens_every_16_bit_value_exactly(dtype: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(bits.shape, np.float32)
    with np.errstate(invalid="ignore"):
        widen(bits, "BF16" if dtype == "bfloat16" else "F16", out)
    floats = mx.array(bits).view(getattr(mx, dtype)).astype(mx.float32)
    numbers = ~np.isnan(out)
    assert numbers.sum() > 60_000
    np.testing.assert_array_equal(np.isnan(out), np.isnan(np.array(floats)))
    np.testing.assert_array_equal(out[numbers].view(np.uint32), np.array(floats)[numbers].view(np.uint32))


def test_float_slots_hold_the_exact_float32_values(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model", header_padding=5))
    store = ExpertStore(checkpoint)
    buffers = LayerBuffers(checkpoint.shape.layers[1], 3, "float32")
    store.read_expert(1, 6, buffers.targets(2))
    bits = expected(checkpoint, 1, 6)[1]
    np.testing.assert_array_equal(
        np.array(buffers.gate.arrays["scales"])[2], np.array(mx.array(bits).view(mx.bfloat16).astype(mx.float32))
    )
    assert not np.array(buffers.gate.arrays["weight"])[:2].any(), "a neighbour's slot was written"
    store.close()


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model"))
    store = ExpertStore(checkpoint)
    store.read_expert(0, 0, raw_targets(checkpoint, 0))
    os.truncate(checkpoint.shards[0].path, 4096)
    with pytest.raises(CheckpointChanged, match=r"model\.safetensors ends"):
        store.read_expert(1, 7, raw_targets(checkpoint, 1))
    store.close()


def test_a_file_that_was_replaced_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model"))
    shard = checkpoint.shards[0].path
    copy = shard.with_suffix(".new")
    copy.write_bytes(shard.read_bytes())
    os.replace(copy, shard)
    with pytest.raises(CheckpointChanged, match="replaced"):
        ExpertStore(checkpoint).read_expert(0, 0, raw_targets(checkpoint, 0))


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model"))
    checkpoint.shards[0].path.unlink()
    with pytest.raises(StoreError, match=r"model\.safetensors cannot be opened"):
        ExpertStore(checkpoint).read_expert(0, 0, raw_targets(checkpoint, 0))


def test_close_gives_descriptors_back_and_reading_opens_again(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model"))
    store = ExpertStore(checkpoint)
    before = len(os.listdir("/dev/fd"))
    store.read_expert(0, 0, raw_targets(checkpoint, 0))
    assert len(os.listdir("/dev/fd")) == before + 1
    store.close()
    assert len(os.listdir("/dev/fd")) == before
    store.read_expert(0, 0, raw_targets(checkpoint, 0))
    store.close()
