"""The verified table is held against mlx-lm's own classes, and everything outside it is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoint_kinds import KINDS
from mlx.utils import tree_flatten

from titan.common.errors import CheckpointContradiction, CheckpointMissing, UnsupportedFamily
from titan.common.registry import open_checkpoint
from titan.common.registry.dimensions import absent_keys, read_dimensions
from titan.common.registry.families import FAMILIES, family_of
from titan.common.registry.non_experts import expected_modules


@pytest.mark.parametrize("name", FAMILIES)
def test_config_keys_are_those_mlx_lm_reads(name: str) -> None:
    family = FAMILIES[name]
    fields = dataclasses.fields(import_module(f"mlx_lm.models.{name}").ModelArgs)
    assert {field.name for field in fields} <= set(family.computation_keys)
    needed = {field.name for field in fields if field.default is dataclasses.MISSING} - {"model_type"}
    assert needed == (set(family.required_keys) | set(family.defaults)) & needed
    for field in fields:
        if field.name in family.defaults and field.default is not dataclasses.MISSING:
            assert family.defaults[field.name] == field.default


@pytest.mark.parametrize("kind", KINDS)
def test_modules_are_those_of_mlx_lms_class(kinds: dict[str, Path], kind: str) -> None:
    config = json.loads((kinds[kind] / "config.json").read_text())
    family = family_of(config)
    dims = read_dimensions(family, config | absent_keys(family, config))
    module = import_module(f"mlx_lm.models.{family.model_type}")
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters: Any = tree_flatten(model.parameters(), destination={})
    expected = {}
    for module in expected_modules(family, dims):
        expected[f"{module.path}.{module.leaf}"] = module.shape
        if module.bias:
            expected[f"{module.path}.bias"] = module.shape[:1]
    assert expected == {n: p.shape for n, p in parameters.items() if ".switch_mlp." not in n and ".experts." not in n}


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("qwen3_next", "mlx-lm itself runs it"),
        ("llama4", "mlx-lm itself runs it"),
        ("no_such_model", "mlx-lm does not know it either"),
        ("../olmoe", "mlx-lm does not know it either"),
        ("switch_layers.evil\n", "mlx-lm does not know it either"),
    ],
)
def test_other_families_are_refused_by_name(model_type: str, said: str) -> None:
    with pytest.raises(UnsupportedFamily) as refused:
        family_of({"model_type": model_type})
    assert repr(model_type) in str(refused.value)
    assert said in str(refused.value)
    assert "kimi_k2, minimax, minimax_m2, mixtral, olmoe, qwen3_moe" in refused.value.mend


def test_code_that_a_checkpoint_brings_is_not_run(copy_of, edit_config: Callable[..., None]) -> None:
    directory = copy_of("olmoe")
    edit_config(directory, model_file="model.py")
    with pytest.raises(UnsupportedFamily, match="model_file"):
        open_checkpoint(directory)


@pytest.mark.parametrize(("kind", "normalise"), [("olmoe", False), ("qwen3", False)])
def test_an_absent_renormalisation_flag_means_the_familys_default(
    kind: str, normalise: bool, copy_of, edit_config: Callable[..., None]
) -> None:
    directory = copy_of(kind)
    edit_config(directory, norm_topk_prob=...)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.routing.normalise is normalise
    assert checkpoint.config_defaults["norm_topk_prob"] is normalise
    edit_config(directory, norm_topk_prob=True)
    assert open_checkpoint(directory).routing.normalise is True


def test_rope_theta_is_found_where_newer_configs_keep_it(copy_of, edit_config: Callable[..., None]) -> None:
    directory = copy_of("qwen3")
    edit_config(directory, rope_theta=..., rope_parameters={"rope_theta": 5e6, "rope_type": "default"})
    assert open_checkpoint(directory).config_defaults["rope_theta"] == 5e6
    edit_config(directory, rope_theta=1e4)
    with pytest.raises(CheckpointContradiction, match="rope_theta"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("kind", "key", "value", "error"),
    [
        ("olmoe", "num_experts", ..., CheckpointMissing),
        ("olmoe", "num_experts", 5000, CheckpointContradiction),
        ("olmoe", "num_experts", True, CheckpointContradiction),
        ("olmoe", "num_experts", "8", CheckpointContradiction),
        ("olmoe", "num_hidden_layers", 0, CheckpointContradiction),
        ("olmoe", "num_hidden_layers", 10**9, CheckpointContradiction),
        ("olmoe", "num_experts_per_tok", 9, CheckpointContradiction),
        ("olmoe", "num_experts_per_tok", True, CheckpointContradiction),
        ("olmoe", "hidden_size", 1e3, CheckpointContradiction),
        ("olmoe", "intermediate_size", -1, CheckpointContradiction),
        ("olmoe", "norm_topk_prob", "false", CheckpointContradiction),
        ("olmoe", "hidden_act", "gelu", CheckpointContradiction),
        ("qwen3", "moe_intermediate_size", ..., CheckpointMissing),
        ("qwen3", "mlp_only_layers", [0.5], CheckpointContradiction),
        ("qwen3", "mlp_only_layers", "all", CheckpointContradiction),
        ("qwen3", "decoder_sparse_step", 0, CheckpointContradiction),
        ("qwen3", "decoder_sparse_step", 99, CheckpointContradiction),  # leaves no layer with experts
    ],
)
def test_config_values_are_bounded(
    kind: str, key: str, value: object, error: type[Exception], copy_of, edit_config: Callable[..., None]
) -> None:
    directory = copy_of(kind)
    edit_config(directory, **{key: value})
    with pytest.raises(error, match=r"config\.json") as refused:
        open_checkpoint(directory)
    assert key in str(refused.value) or "layer" in str(refused.value)
