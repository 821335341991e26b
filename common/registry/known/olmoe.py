"""OLMoE: every layer MoE, softmax routing, experts as wide as `intermediate_size`."""

from __future__ import annotations

from titan.common.registry.family import Family, Module, attention, embeddings
from titan.common.registry.known.keys import COMMON_KEYS, COMMON_REQUIRED

OLMOE = Family(
    model_type="olmoe",
    expert_width="intermediate_size",
    modules=(
        *embeddings(),
        Module("model.layers.{layer}.mlp.gate", ("experts", "hidden"), "moe"),
        *attention("attention_bias"),
        Module("model.layers.{layer}.self_attn.q_norm", ("queries",), "layer"),
        Module("model.layers.{layer}.self_attn.k_norm", ("keys",), "layer"),
    ),
    computation_keys=(*COMMON_KEYS, "mlp_bias", "rope_traditional", "clip_qkv"),
    required_keys=COMMON_REQUIRED,
    defaults={
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    },
    per_expert_components=("weight", "scales", "biases"),
)
