"""DeepSeek-V3 and Kimi-K2: latent attention, dense first layers, shared experts, grouped sigmoid routing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from titan.common.registry.family import Family, Module, embeddings, mlp
from titan.common.registry.known.keys import SHARED_KEYS, WIDTHS
from titan.common.registry.known.leading import GROUPED_KEYS, after_dense_layers

_ATTENTION, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
_LATENT = (f"{_ATTENTION}.kv_b_proj", ("latent_keys_values", "latent"))


def _sizes(number: Callable[[str], int]) -> Mapping[str, int]:
    heads, latent, value = number("num_attention_heads"), number("kv_lora_rank"), number("v_head_dim")
    nope, rope = number("qk_nope_head_dim"), number("qk_rope_head_dim")
    return {
        "heads": heads,
        "latent": latent,
        "rope": rope,
        "nope": nope,
        "value": value,
        "query_latent": number("q_lora_rank"),
        "latent_queries": heads * (nope + rope),
        "latent_cache": latent + rope,
        "latent_keys_values": heads * (nope + value),
        "latent_values": heads * value,
        "shared": number("n_shared_experts") * number("moe_intermediate_size"),
    }


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    aliases=("kimi_k2",),
    expert_width="moe_intermediate_size",
    modules=(
        *embeddings(),
        Module(f"{_ATTENTION}.q_proj", ("latent_queries", "hidden"), "layer", lacks="query_latent"),
        Module(f"{_ATTENTION}.q_a_proj", ("query_latent", "hidden"), "layer", "attention_bias", needs="query_latent"),
        Module(f"{_ATTENTION}.q_a_layernorm", ("query_latent",), "layer", needs="query_latent"),
        Module(f"{_ATTENTION}.q_b_proj", ("latent_queries", "query_latent"), "layer", needs="query_latent"),
        Module(f"{_ATTENTION}.kv_a_proj_with_mqa", ("latent_cache", "hidden"), "layer", "attention_bias"),
        Module(f"{_ATTENTION}.kv_a_layernorm", ("latent",), "layer"),
        Module(f"{_ATTENTION}.embed_q", ("heads", "latent", "nope"), "layer", older=_LATENT[0], older_shape=_LATENT[1]),
        Module(
            f"{_ATTENTION}.unembed_out", ("heads", "value", "latent"), "layer", older=_LATENT[0], older_shape=_LATENT[1]
        ),
        Module(f"{_ATTENTION}.o_proj", ("hidden", "latent_values"), "layer", "attention_bias"),
        Module(f"{_MLP}.gate", ("experts", "hidden"), "moe"),
        Module(f"{_MLP}.gate", ("experts",), "moe", leaf="e_score_correction_bias"),
        *mlp(f"{_MLP}.shared_experts", "shared", "moe", needs="shared"),
        *mlp(_MLP, "dense", "dense"),
    ),
    computation_keys=(
        *SHARED_KEYS,
        *GROUPED_KEYS,
        "moe_layer_freq",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "attention_bias",
    ),
    required_keys=(
        *WIDTHS,
        *(key for key in GROUPED_KEYS if key not in ("scoring_func", "topk_method", "n_shared_experts")),
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
    ),
    defaults={"attention_bias": False, "moe_layer_freq": 1, "tie_word_embeddings": False},
    fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "tie_word_embeddings": False},
    experts_key="n_routed_experts",
    is_moe=after_dense_layers,
    sizes=_sizes,
    cache=("latent", "rope"),
    per_expert_components=("weight", "scales", "biases"),
    scoring="sigmoid",
    correction="gate.e_score_correction_bias",
)
