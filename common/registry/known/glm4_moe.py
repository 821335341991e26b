"""GLM-4.5 and its kin: dense first layers, shared experts, sigmoid routing in groups with a correction bias."""

from __future__ import annotations

from titan.common.registry.family import Family, Module, attention, embeddings, mlp
from titan.common.registry.known.keys import SHARED_KEYS, WIDTHS
from titan.common.registry.known.leading import GROUPED_KEYS, after_dense_layers

_MLP = "model.layers.{layer}.mlp"

GLM4_MOE = Family(
    model_type="glm4_moe",
    expert_width="moe_intermediate_size",
    modules=(
        *embeddings(),
        *attention("attention_bias", output_bias=""),
        Module("model.layers.{layer}.self_attn.q_norm", ("head",), "layer", needs="qk_norm"),
        Module("model.layers.{layer}.self_attn.k_norm", ("head",), "layer", needs="qk_norm"),
        Module(f"{_MLP}.gate", ("experts", "hidden"), "moe"),
        Module(f"{_MLP}.gate", ("experts",), "moe", leaf="e_score_correction_bias"),
        *mlp(f"{_MLP}.shared_experts", "shared", "moe", needs="shared"),
        *mlp(_MLP, "dense", "dense"),
    ),
    computation_keys=(
        *SHARED_KEYS,
        *GROUPED_KEYS,
        "head_dim",
        "use_qk_norm",
        "attention_bias",
        "partial_rotary_factor",
    ),
    required_keys=(
        *WIDTHS,
        *(key for key in GROUPED_KEYS if key not in ("scoring_func", "topk_method")),
        "head_dim",
        "max_position_embeddings",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_theta",
        "use_qk_norm",
    ),
    defaults={"rope_scaling": None, "attention_bias": False, "tie_word_embeddings": False},
    fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "tie_word_embeddings": False},
    experts_key="n_routed_experts",
    is_moe=after_dense_layers,
    sizes=lambda number: {
        "qk_norm": number("use_qk_norm"),
        "shared": number("n_shared_experts") * number("moe_intermediate_size"),
    },
    per_expert_components=("weight", "scales", "biases"),
    scoring="sigmoid",
    correction="gate.e_score_correction_bias",
)
