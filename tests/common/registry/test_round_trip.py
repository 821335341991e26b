"""What the registry says of a checkpoint is what mlx-lm finds in it: bytes, shapes, quantization, routing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fixtures.checkpoint_kinds import KINDS
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.utils import load_model

from titan.common.registry import Checkpoint, ComponentRange, ModelShape, open_checkpoint
from titan.common.registry.families import FAMILIES
from titan.deploy import DEMO_MODEL

PROMPT = mx.array([[5, 99, 1024, 7, 7, 300]])


def host_model(path: Path) -> Any:
    """mlx-lm's model, strictly loaded: every name and shape of the checkpoint is one of mlx-lm's own."""
    model, _ = load_model(path, lazy=True, strict=True)
    return model


def bytes_at(part: ComponentRange) -> bytes:
    with open(part.file, "rb") as file:
        file.seek(part.offset)
        return file.read(part.nbytes)


def raw(array: mx.array) -> bytes:
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes()


def module_at(model: Any, path: str) -> Any:
    for part in path.split("."):
        model = model[int(part)] if part.isdecimal() else model[part]
    return model


def assert_experts_equal(checkpoint: Checkpoint, model: Any) -> None:
    for layer in checkpoint.shape.layers:
        experts = module_at(model, layer.module_path)
        for expert in range(checkpoint.shape.num_experts):
            specs = [(m, c) for m in layer.matrices for c in m.components]
            for (matrix, component), part in zip(specs, checkpoint.ranges(layer.index, expert), strict=True):
                assert (part.matrix, part.component) == (matrix.name, component.name)
                assert part.nbytes == component.nbytes
                array = experts[f"{matrix.name}_proj"][component.name][expert]
                assert component.shape == array.shape
                assert bytes_at(part) == raw(array), (layer.index, expert, matrix.name, component.name)


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_hold_the_bytes_that_mlx_lm_loads(kinds: dict[str, Path], kind: str) -> None:
    if kind == "per-expert-quantized":
        assert "scales" in str(open_checkpoint(kinds[kind]).ranges(0, 0))
    checkpoint, model = open_checkpoint(kinds[kind]), host_model(kinds[kind])
    assert_experts_equal(checkpoint, model)


def test_demo_model() -> None:
    checkpoint = open_checkpoint(DEMO_MODEL)
    assert (checkpoint.shape.num_layers, checkpoint.shape.num_experts, checkpoint.shape.top_k) == (8, 32, 4)
    assert checkpoint.shape.layers[0].expert_bytes == 3 * 128 * 128 * (4 / 8 + 4 / 64)
    assert_experts_equal(checkpoint, host_model(DEMO_MODEL))


@pytest.mark.parametrize("kind", KINDS)
def test_modes_and_layers_are_those_mlx_lm_executes(kinds: dict[str, Path], kind: str) -> None:
    checkpoint, model = open_checkpoint(kinds[kind]), host_model(kinds[kind])
    family = FAMILIES[checkpoint.shape.family]
    moe = {spec.index: spec for spec in checkpoint.shape.layers}
    paths = {path for path, module in model.named_modules() if isinstance(module, SwitchGLU)}
    assert {spec.module_path for spec in checkpoint.shape.layers} == paths
    for index in range(checkpoint.shape.num_layers):
        assert (index in moe) != (index in checkpoint.dense_layers)
        if index not in moe:
            continue
        experts = module_at(model, moe[index].module_path)
        block = module_at(model, moe[index].module_path.rpartition(".")[0])
        top_k = block.top_k if hasattr(block, "top_k") else block.num_experts_per_tok
        assert checkpoint.shape.top_k == checkpoint.routing.top_k == top_k
        router = block if hasattr(block, "norm_topk_prob") else block[family.router]
        if hasattr(router, "norm_topk_prob"):
            assert router.norm_topk_prob == checkpoint.routing.normalise
        for matrix in moe[index].matrices:
            linear = experts[f"{matrix.name}_proj"]
            executed = (linear.bits, linear.group_size, linear.mode) if "scales" in linear else (None, None, None)
            assert (matrix.bits, matrix.group_size, matrix.mode) == executed
            assert (matrix.in_features, matrix.out_features) == (linear.input_dims, linear.output_dims)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_and_the_rest_are_the_whole_checkpoint(kinds: dict[str, Path], kind: str) -> None:
    checkpoint = open_checkpoint(kinds[kind])
    stored: dict[str, mx.array] = {}
    for shard in checkpoint.shards:
        loaded = mx.load(str(shard.path))
        assert isinstance(loaded, dict)
        stored |= loaded
    others = {tensor.name: tensor for tensor in checkpoint.non_expert_tensors}
    assert others.keys() | checkpoint.expert_tensor_names == stored.keys()
    assert not others.keys() & checkpoint.expert_tensor_names
    assert checkpoint.non_expert_bytes == sum(stored[name].nbytes for name in others)
    assert checkpoint.expert_bytes_total == sum(stored[name].nbytes for name in checkpoint.expert_tensor_names)
    for name, tensor in others.items():
        assert tensor.shape == stored[name].shape
        with open(tensor.file, "rb") as file:
            file.seek(tensor.offset)
            assert file.read(tensor.nbytes) == raw(stored[name])


def test_offsets_may_be_odd(kinds: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(kinds["mixed"])
    assert any(part.offset % 2 for part in checkpoint.ranges(0, 0)), "the recipe no longer moves tensors to odd offsets"


def test_symlinks_keep_their_name(kinds: dict[str, Path], tmp_path: Path) -> None:
    """The Hugging Face cache: snapshot names link to blobs named by hash."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, file in enumerate(sorted(kinds["mixed"].iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(os.path.join("..", "blobs", str(number)))
    checkpoint = open_checkpoint(snapshot)
    assert [shard.path for shard in checkpoint.shards] == sorted(snapshot.glob("model*.safetensors"))
    for shard in checkpoint.shards:
        status = os.stat(shard.path)
        assert shard.identity == (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    assert checkpoint.shape == open_checkpoint(kinds["mixed"]).shape
    assert_experts_equal(checkpoint, host_model(kinds["mixed"]))


def test_other_files_do_not_matter(kinds: dict[str, Path], copy_of) -> None:
    directory = copy_of("olmoe")
    for name in ("adapters.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"):
        (directory / name).write_bytes(b"anything")
    assert open_checkpoint(directory).shape == open_checkpoint(kinds["olmoe"]).shape


def test_relative_paths_do_not_depend_on_the_working_directory(
    kinds: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kinds["olmoe"].parent)
    checkpoint = open_checkpoint(Path("olmoe"))
    assert checkpoint.path == kinds["olmoe"]
    assert checkpoint.ranges(0, 0)[0].file.is_absolute()


def test_ranges_of_what_is_not_there(kinds: dict[str, Path]) -> None:
    for kind, layer, expert in (
        ("hugging-face-qwen3", 0, 0),  # dense
        ("olmoe", 2, 0),
        ("olmoe", 0, 8),
        ("olmoe", 0, -1),
        ("hugging-face", 0, -1),
    ):
        with pytest.raises(KeyError):
            open_checkpoint(kinds[kind]).ranges(layer, expert)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_survives_the_wire(kinds: dict[str, Path], kind: str) -> None:
    shape = open_checkpoint(kinds[kind]).shape
    assert ModelShape.from_json(shape.to_json()) == shape
