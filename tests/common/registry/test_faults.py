"""Checkpoints that are wrong in a way somebody has met: each is refused with the file and the tensor, or read right.

The cases are the reports listed for these families: missing and doubled shards, lying indices, truncated tails,
absent layers, quantization that config and shapes tell differently.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.safetensors_file import Tensor, read_tensors, write_tensors

from titan.common.errors import (
    CheckpointContradiction,
    CheckpointError,
    CheckpointMissing,
    CheckpointTruncated,
    UnsupportedFamily,
)
from titan.common.registry import open_checkpoint

Copy = Callable[[str], Path]
Edit = Callable[..., None]
UP = "model.layers.1.mlp.switch_mlp.up_proj"
INDEX = "model.safetensors.index.json"


def refused(directory: Path, error: type[CheckpointError], *words: str) -> CheckpointError:
    with pytest.raises(error) as caught:
        open_checkpoint(directory)
    for word in words:
        assert word in caught.value.cause
    assert caught.value.mend
    return caught.value


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], object], file: str = "model.safetensors") -> None:
    tensors = read_tensors(directory / file)
    edit(tensors)
    write_tensors(directory / file, tensors)
    (directory / INDEX).unlink(missing_ok=True)


def test_missing_shard_of_a_numbered_set(copy_of: Copy) -> None:
    directory = copy_of("mixed")
    (directory / INDEX).unlink()
    (directory / "model-00002-of-00003.safetensors").unlink()
    refused(directory, CheckpointMissing, "2 of 3 shards", "model-00002-of-00003.safetensors")


def test_missing_shard_that_the_index_names(copy_of: Copy) -> None:
    directory = copy_of("olmoe")
    (directory / "model.safetensors").rename(directory / "model-a.safetensors")
    refused(directory, CheckpointMissing, INDEX, "model.safetensors'")


def test_numbering_before_the_suffix_is_understood(copy_of: Copy) -> None:
    directory = copy_of("mixed")
    (directory / INDEX).unlink()
    for number in (1, 2, 3):
        old = directory / f"model-{number:05d}-of-00003.safetensors"
        old.rename(directory / f"model.safetensors-{number:05d}-of-00003.safetensors")
    assert len(open_checkpoint(directory).shards) == 3


def test_files_that_mlx_lm_would_not_load_are_named(copy_of: Copy) -> None:
    directory = copy_of("olmoe")
    (directory / "model.safetensors").rename(directory / "model.safetensors-00001-of-00001")
    refused(directory, CheckpointMissing, "model.safetensors-00001-of-00001", "does not load")


def test_dangling_link(copy_of: Copy) -> None:
    directory = copy_of("olmoe")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("../blobs/gone")
    refused(directory, CheckpointMissing, "model.safetensors", "No such file")


def test_tensor_in_two_shards(copy_of: Copy) -> None:
    directory = copy_of("olmoe")
    name = "model.layers.0.mlp.gate.weight"
    write_tensors(directory / "model-extra.safetensors", {name: read_tensors(directory / "model.safetensors")[name]})
    refused(directory, CheckpointContradiction, name, "model.safetensors", "model-extra.safetensors")


def test_no_index_is_fine(copy_of: Copy) -> None:
    directory = copy_of("mixed")
    before = open_checkpoint(directory).shape
    (directory / INDEX).unlink()
    assert open_checkpoint(directory).shape == before


@pytest.mark.parametrize("lie", ["stale tensor", "incomplete", "other shard", "not JSON", "no map", "not a name"])
def test_index_that_lies(copy_of: Copy, lie: str) -> None:
    directory = copy_of("mixed")
    path = directory / INDEX
    index = json.loads(path.read_text())
    weight_map = index["weight_map"]
    name = f"{UP}.weight"
    error: type[CheckpointError] = CheckpointContradiction
    words = (name,)
    if lie == "stale tensor":
        weight_map["model.old.weight"] = weight_map[name]
        error, words = CheckpointMissing, ("model.old.weight",)
    elif lie == "incomplete":
        words = (name, weight_map.pop(name))
    elif lie == "other shard":
        weight_map[name] = next(shard for shard in weight_map.values() if shard != weight_map[name])
    elif lie == "no map":
        index, words = {"metadata": {}}, ("weight_map",)
    elif lie == "not a name":
        weight_map[name], error = {}, CheckpointMissing
    else:
        error, words = CheckpointTruncated, ()
    path.write_text(json.dumps(index) if lie != "not JSON" else '{"weight_map": {')
    refused(directory, error, INDEX, *words)


def test_truncated_tail_names_the_tensor(copy_of: Copy) -> None:
    directory = copy_of("olmoe")
    path = directory / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    refused(directory, CheckpointTruncated, str(path), "before its tensor model.norm.weight")


@pytest.mark.parametrize("layer", ["model.layers.1.", "model.layers.0.self_attn.k_proj."])
def test_absent_layer(copy_of: Copy, layer: str) -> None:
    directory = copy_of("olmoe")
    edit_tensors(directory, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith(layer)])
    refused(directory, CheckpointMissing, layer)


def test_absent_dense_layer(copy_of: Copy) -> None:
    directory = copy_of("qwen3")
    edit_tensors(directory, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    refused(directory, CheckpointMissing, "model.layers.2.mlp.up_proj.weight")


def test_absent_projection(copy_of: Copy) -> None:
    directory = copy_of("olmoe")
    edit_tensors(directory, lambda tensors: tensors.pop(f"{UP}.weight"))
    refused(directory, CheckpointMissing, f"{UP}.weight")


def test_absent_zero_points(copy_of: Copy) -> None:
    directory = copy_of("olmoe")
    edit_tensors(directory, lambda tensors: tensors.pop(f"{UP}.biases"))
    refused(directory, CheckpointContradiction, f"{UP}.weight", "no biases")


@pytest.mark.parametrize("module", [UP, "model.layers.1.self_attn.k_proj"])
def test_zero_points_that_do_not_fit_the_scales(copy_of: Copy, module: str) -> None:
    directory = copy_of("olmoe")
    edit_tensors(directory, lambda tensors: setattr(tensors[f"{module}.biases"], "dtype", "F16"))
    refused(directory, CheckpointContradiction, f"biases of {module}.weight", "F16", "BF16")


@pytest.mark.parametrize("name", [f"{UP}.bias", "model.norm.weight", "model.layers.0.mlp.gate.weight"])
def test_shape_of_a_small_tensor(copy_of: Copy, name: str) -> None:
    directory = copy_of("mixed")
    file = next(f for f in directory.glob("model-*") if name in read_tensors(f))
    edit_tensors(directory, lambda tensors: tensors[name].shape.append(1), file.name)
    refused(directory, CheckpointContradiction, name, ", 1]", str(file))


def test_absent_scales(copy_of: Copy) -> None:
    directory = copy_of("olmoe")
    edit_tensors(directory, lambda tensors: tensors.pop(f"{UP}.scales"))
    refused(directory, CheckpointContradiction, f"{UP}.weight", "no scales")


def test_absent_expert(copy_of: Copy) -> None:
    directory = copy_of("hugging-face")
    (directory / INDEX).unlink()
    name = "model.layers.1.mlp.experts.7.down_proj.weight"
    file = next(f for f in directory.glob("model-*") if name in read_tensors(f))
    edit_tensors(directory, lambda tensors: tensors.pop(name), file.name)
    refused(directory, CheckpointMissing, name)


def test_expert_of_another_shape(copy_of: Copy) -> None:
    directory = copy_of("hugging-face-qwen3")
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    edit_tensors(directory, lambda tensors: setattr(tensors[name], "shape", [64, 256]))
    refused(directory, CheckpointContradiction, name, "model.layers.1.mlp.experts.0.gate_proj.weight", "[64, 256]")


def test_both_layouts_in_one_layer(copy_of: Copy) -> None:
    directory = copy_of("olmoe")
    name = "model.layers.1.mlp.experts.4.gate_proj.weight"
    edit_tensors(directory, lambda tensors: tensors.update({name: Tensor("BF16", [128, 128], bytes(2 * 128 * 128))}))
    refused(directory, CheckpointContradiction, name, "stacked")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_experts", 16, ("model.layers.0.mlp.switch_mlp.gate_proj.weight", "num_experts 16")),
        ("num_experts", 4, ("model.layers.0.mlp.switch_mlp.gate_proj.weight", "num_experts 4")),
        ("hidden_size", 256, ("model.layers.0.mlp.switch_mlp.gate_proj.weight", "256 inputs")),
        ("intermediate_size", 64, ("model.layers.0.mlp.switch_mlp.gate_proj.weight", "64 x 128")),
        ("vocab_size", 4096, ("model.embed_tokens.weight", "4096 x 128")),
        ("num_key_value_heads", 1, ("model.layers.0.self_attn.k_proj.weight", "64 x 128")),
        ("num_hidden_layers", 1, ("model.layers.1.", "config.json says 1 layers")),
    ],
)
def test_shapes_that_differ_from_the_config(
    copy_of: Copy, edit_config: Edit, key: str, value: int, words: tuple[str, ...]
) -> None:
    directory = copy_of("olmoe")
    edit_config(directory, **{key: value})
    refused(directory, CheckpointContradiction, *words)


def test_more_layers_in_the_config_than_in_the_files(copy_of: Copy, edit_config: Edit) -> None:
    directory = copy_of("olmoe")
    edit_config(directory, num_hidden_layers=3)
    refused(directory, CheckpointMissing, "model.layers.2.mlp.switch_mlp.gate_proj.weight")


def test_more_experts_in_the_files_than_in_the_config(copy_of: Copy, edit_config: Edit) -> None:
    directory = copy_of("hugging-face-qwen3")
    router = "model.layers.{}.mlp.gate.weight"
    edit_config(directory, num_experts=6)

    def shrink(tensors: dict[str, Tensor]) -> None:
        for layer in (1, 2):
            tensor = tensors[router.format(layer)]
            tensor.shape, tensor.data = [6, 128], tensor.data[: 6 * 128 * 2]

    edit_tensors(directory, shrink)
    refused(directory, CheckpointContradiction, "experts.6.", "config.json says 6 experts")


def test_dense_layers_and_moe_layers_confused(copy_of: Copy, edit_config: Edit) -> None:
    directory = copy_of("qwen3")
    edit_config(directory, mlp_only_layers=[])
    refused(directory, CheckpointMissing, "model.layers.1.mlp.switch_mlp.gate_proj.weight")


def test_tied_head_that_leaves_its_scales(copy_of: Copy, edit_config: Edit) -> None:
    directory = copy_of("mxfp4")
    edit_config(directory, tie_word_embeddings=True)
    refused(directory, CheckpointContradiction, "lm_head.", "ties the head")


def test_tied_head_that_mlx_lm_drops(copy_of: Copy) -> None:
    directory = copy_of("hugging-face-qwen3")
    head = Tensor("F16", [2048, 128], bytes(2 * 2048 * 128))
    edit_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert "lm_head.weight" in {tensor.name for tensor in open_checkpoint(directory).non_expert_tensors}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate.gate_proj.weight",
        "xmodel.layers.0.mlp.switch_mlp.gate_proj.weight",
        "model.layers.0.mlp.switch_mlp.gate_proj.weight.weight",
        "model.layers.00.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.switch_mlp.gate_up_proj.weight",
        "model.layers.0.mlp.switch_mlp.gate_proj.global_scale",
    ],
)
def test_names_that_resemble_an_experts(copy_of: Copy, name: str) -> None:
    directory = copy_of("olmoe")
    edit_tensors(directory, lambda tensors: tensors.update({name: Tensor("F32", [1], bytes(4))}))
    refused(directory, CheckpointContradiction, name)


# Quantization: what config.json says against what the shapes say.


def set_quantization(directory: Path, edit_config: Edit, **keys: object) -> None:
    quantization = json.loads((directory / "config.json").read_text())["quantization"] | keys
    quantization = {key: value for key, value in quantization.items() if value is not ...}
    edit_config(directory, quantization=quantization, quantization_config=quantization)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"bits": 8}, "8-bit affine, group 64"),
        ({"group_size": 32}, "4-bit affine, group 32"),
        ({"mode": "mxfp4", "group_size": 32}, "4-bit mxfp4, group 32"),
        ({UP: {"bits": 8, "group_size": 64}}, "8-bit affine, group 64"),
        ({UP: False}, "not quantized"),
        ({"language_model." + UP: {"bits": 2, "group_size": 64}}, "2-bit affine, group 64"),
    ],
)
def test_config_and_shapes_contradict(copy_of: Copy, edit_config: Edit, setting: dict, says: str) -> None:
    directory = copy_of("olmoe")
    set_quantization(directory, edit_config, **setting)
    refused(directory, CheckpointContradiction, "quantization", says, "4-bit affine, group 64", "switch_mlp")


def test_global_mode_does_not_reach_an_override_without_one(copy_of: Copy, edit_config: Edit) -> None:
    directory = copy_of("mxfp4")  # its router is such an override, and affine
    open_checkpoint(directory)
    set_quantization(directory, edit_config, **{"model.layers.0.mlp.gate": ...})
    refused(directory, CheckpointContradiction, "model.layers.0.mlp.gate", "4-bit mxfp4", "8-bit affine")


def test_old_files_have_no_mode(copy_of: Copy, edit_config: Edit) -> None:
    directory = copy_of("olmoe")
    before = open_checkpoint(directory).shape
    set_quantization(directory, edit_config, mode=...)
    assert open_checkpoint(directory).shape == before


def test_override_under_a_renamed_prefix_is_read(copy_of: Copy, edit_config: Edit) -> None:
    directory = copy_of("mixed")
    override = "model.layers.1.mlp.switch_mlp.down_proj"
    set_quantization(
        directory, edit_config, **{override: ..., f"language_model.{override}": {"bits": 8, "group_size": 32}}
    )
    assert open_checkpoint(directory).shape.layer(1).matrices[2].bits == 8


def test_mirror_that_differs(copy_of: Copy, edit_config: Edit) -> None:
    directory = copy_of("olmoe")
    edit_config(directory, quantization_config={"bits": 8, "group_size": 64})
    refused(directory, CheckpointContradiction, "quantization_config")


def test_quantized_tensors_without_a_quantization_in_the_config(copy_of: Copy, edit_config: Edit) -> None:
    directory = copy_of("olmoe")
    edit_config(directory, quantization=...)
    refused(directory, CheckpointContradiction, "quantization_config but no quantization")
    edit_config(directory, quantization=..., quantization_config=...)
    refused(directory, CheckpointContradiction, "not quantized", "4-bit affine")


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors"])
def test_foreign_quantization_is_refused_by_name(copy_of: Copy, edit_config: Edit, method: str) -> None:
    directory = copy_of("hugging-face")
    edit_config(directory, quantization_config={"quant_method": method, "bits": 4})
    refused(directory, UnsupportedFamily, method)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_fp8_is_not_read_as_4_bit(copy_of: Copy, dtype: str) -> None:
    directory = copy_of("hugging-face-qwen3")
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"

    def shrink(tensors: dict[str, Tensor]) -> None:
        for expert in range(8):
            tensors[name.format(expert)] = Tensor(dtype, [128, 128], bytes(128 * 128))

    edit_tensors(directory, shrink)
    refused(directory, UnsupportedFamily, name.format(0), dtype)


@pytest.mark.parametrize(
    "quantization",
    [
        "4bit",
        {"bits": "4", "group_size": 64},
        {"bits": 4, "group_size": True},
        {"bits": 4},
        {"bits": 4, "group_size": 64, "mode": "q4_k"},
        {"bits": 4, "group_size": 64, "mode": ["affine"]},
        {"bits": 4, "group_size": 64, UP: {"bits": -4}},
    ],
)
def test_malformed_settings(copy_of: Copy, edit_config: Edit, quantization: object) -> None:
    directory = copy_of("olmoe")
    edit_config(directory, quantization=quantization, quantization_config=...)
    refused(directory, CheckpointContradiction, "config.json: quantization")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "nul", '{"a": 1, "a": 2}', "[" * 100_000, '{"a":' * 100 + "1" + "}" * 100]
)
def test_config_that_is_not_one(copy_of: Copy, text: str) -> None:
    directory = copy_of("olmoe")
    (directory / "config.json").write_text(text)
    refused(directory, CheckpointTruncated, "config.json")
