"""The verified table: which model families open, how they name their tensors and how they route.

A family is data: config keys, name templates, which layers are MoE, and every tensor outside the experts with its
shape. Names are expanded from the templates and looked up whole, so nothing that merely resembles one can match
(Ling's `gate.gate_proj` is no expert's `gate_proj`). A new family is one more entry and its row in the tests, which
hold the table against mlx-lm's own classes. Knows config values, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from titan.common.errors import CheckpointContradiction, UnsupportedFamily
from titan.common.registry.shape import MAX_LAYERS

__all__ = ["FAMILIES", "Config", "Family", "Module", "family_of", "require_weighted_sum"]

Config = Mapping[str, object]
MLX_LM_ALIASES = {"kimi_k2": "deepseek_v3", "minimax_m2": "minimax"}  # model_type -> mlx-lm's file


@dataclass(frozen=True, slots=True)
class Module:
    """Tensors outside the experts: `path` with {layer}, `shape` in names of `Dimensions.sizes`.

    Args:
        where: "once", "layer" (every layer), "moe" or "dense" (layers of that kind), "head" (unless tied).
        bias: whether the module has a `.bias` when the config sets attention_bias.
    """

    path: str
    shape: tuple[str, ...]
    where: str
    bias: bool = False


def _every_layer(_config: Config, _layer: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table.

    Args:
        model_type: as in config.json, and the name of mlx-lm's file.
        expert_width: config key of an expert's width.
        modules: every module outside the experts.
        computation_keys: config keys that change what is computed; they enter the fingerprint.
        required_keys: keys that mlx-lm's ModelArgs has no default for.
        defaults: the family's own values for absent keys, never a global one.
        is_moe: whether a layer has experts.
        stacked, per_expert: paths of the experts' module, [E, out, in] tensors or one tensor an expert.
        per_expert_components: what mlx-lm stacks when it reads the per-expert layout.
        scoring: "softmax": over all experts, then top-k.
        weighted_sum: mlx-lm's block does nothing with the experts' outputs y but
            `(y * scores[..., None]).sum(axis=-2)`, cast to y's dtype or not. Otherwise wire precision `reduced` is
            refused.
        dropped_when_tied: tensors that mlx-lm ignores when the head is tied to the embedding.
    """

    model_type: str
    expert_width: str
    modules: tuple[Module, ...]
    computation_keys: tuple[str, ...]
    required_keys: tuple[str, ...]
    defaults: Mapping[str, object]
    is_moe: Callable[[Config, int], bool] = _every_layer
    stacked: str = "model.layers.{layer}.mlp.switch_mlp"
    per_expert: str = "model.layers.{layer}.mlp.experts.{expert}"
    projections: Mapping[str, str] = field(
        default_factory=lambda: {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    )
    per_expert_components: tuple[str, ...] = ("weight",)
    scoring: str = "softmax"
    weighted_sum: bool = False
    dropped_when_tied: tuple[str, ...] = ()


def _attention(bias: bool) -> tuple[Module, ...]:
    path = "model.layers.{layer}.self_attn."
    return (
        Module(f"{path}q_proj", ("queries", "hidden"), "layer", bias),
        Module(f"{path}k_proj", ("keys", "hidden"), "layer", bias),
        Module(f"{path}v_proj", ("keys", "hidden"), "layer", bias),
        Module(f"{path}o_proj", ("hidden", "queries"), "layer", bias),
    )


_COMMON_MODULES = (
    Module("model.embed_tokens", ("vocab", "hidden"), "once"),
    Module("model.norm", ("hidden",), "once"),
    Module("lm_head", ("vocab", "hidden"), "head"),
    Module("model.layers.{layer}.input_layernorm", ("hidden",), "layer"),
    Module("model.layers.{layer}.post_attention_layernorm", ("hidden",), "layer"),
    Module("model.layers.{layer}.mlp.gate", ("experts", "hidden"), "moe"),
)
_COMMON_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "hidden_act",
    "quantize_activations",
)
_COMMON_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "rms_norm_eps",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
)

OLMOE = Family(
    model_type="olmoe",
    expert_width="intermediate_size",
    modules=(
        *_COMMON_MODULES,
        *_attention(bias=True),
        Module("model.layers.{layer}.self_attn.q_norm", ("queries",), "layer"),
        Module("model.layers.{layer}.self_attn.k_norm", ("keys",), "layer"),
    ),
    computation_keys=(*_COMMON_KEYS, "mlp_bias", "rope_traditional", "clip_qkv"),
    required_keys=_COMMON_REQUIRED,
    defaults={
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    },
    per_expert_components=("weight", "scales", "biases"),
    weighted_sum=True,
)


def _qwen3_moe_layer(config: Config, layer: int) -> bool:
    dense = config["mlp_only_layers"]
    step = config["decoder_sparse_step"]
    if not isinstance(dense, list) or not all(type(item) is int for item in dense):
        raise CheckpointContradiction("config.json: mlp_only_layers is not a list of layer numbers", "Correct it")
    if type(step) is not int or not 1 <= step <= MAX_LAYERS:
        raise CheckpointContradiction(
            f"config.json: decoder_sparse_step is {str(step)[:40]!r}, not a number in 1..{MAX_LAYERS}", "Correct it"
        )
    return layer not in dense and (layer + 1) % step == 0


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    expert_width="moe_intermediate_size",
    modules=(
        *_COMMON_MODULES,
        *_attention(bias=False),
        Module("model.layers.{layer}.self_attn.q_norm", ("head",), "layer"),
        Module("model.layers.{layer}.self_attn.k_norm", ("head",), "layer"),
        Module("model.layers.{layer}.mlp.gate_proj", ("dense", "hidden"), "dense"),
        Module("model.layers.{layer}.mlp.up_proj", ("dense", "hidden"), "dense"),
        Module("model.layers.{layer}.mlp.down_proj", ("hidden", "dense"), "dense"),
    ),
    computation_keys=(*_COMMON_KEYS, "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    required_keys=(
        *_COMMON_REQUIRED,
        "moe_intermediate_size",
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
        "max_position_embeddings",
    ),
    # Absent keys as the family's own config class has them; the published configs say norm_topk_prob: true.
    defaults={
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    },
    is_moe=_qwen3_moe_layer,
    dropped_when_tied=("lm_head.weight",),
    weighted_sum=True,
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (OLMOE, QWEN3_MOE)}


def family_of(config: Config) -> Family:
    """The family of a config.

    Raises:
        UnsupportedFamily: not in the table, or the checkpoint brings its own code.
    """
    model_type = config.get("model_type")
    opened = ", ".join(sorted(FAMILIES))
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedFamily("config.json names no model_type", f"Titan opens {opened}")
    if config.get("model_file") is not None:
        raise UnsupportedFamily(
            "config.json names a model_file, which is code of its own", f"Titan runs mlx-lm's classes only: {opened}"
        )
    family = FAMILIES.get(model_type)
    if family is not None:
        return family
    known = _mlx_lm_knows(MLX_LM_ALIASES.get(model_type, model_type))
    raise UnsupportedFamily(
        f"the model family {model_type[:60]!r} is not in Titan's verified table "
        f"({'mlx-lm itself runs it' if known else 'mlx-lm does not know it either'})",
        f"Titan opens {opened}; another one needs an entry in common/registry/families.py "
        "(layers, names, routing) verified against its class in mlx-lm",
    )


def require_weighted_sum(model_type: str) -> None:
    """Whether workers may sum for a family of the table.

    Raises:
        UnsupportedFamily: its block combines experts in another way.
    """
    if not FAMILIES[model_type].weighted_sum:
        raise UnsupportedFamily(
            f"mlx-lm's {model_type} combines its experts' outputs in another way than by a score-weighted sum, which "
            "is what workers compute with `precision: reduced`",
            "set `precision: exact` in hosts.yaml",
        )


def _mlx_lm_knows(module: str) -> bool:
    spec = find_spec("mlx_lm")  # finds the package without importing it
    locations = spec.submodule_search_locations or [] if spec is not None else []
    return module.isidentifier() and any((Path(place) / "models" / f"{module}.py").is_file() for place in locations)
