"""Mixtral: every layer MoE, softmax over the chosen, which is softmax over all and renormalised."""

from __future__ import annotations

from titan.common.registry.family import Family, Module, attention, embeddings
from titan.common.registry.known.keys import SHARED_KEYS, WIDTHS

MIXTRAL = Family(
    model_type="mixtral",
    expert_width="intermediate_size",
    modules=(
        *embeddings(),
        Module("model.layers.{layer}.block_sparse_moe.gate", ("experts", "hidden"), "moe"),
        *attention(),
    ),
    computation_keys=(*SHARED_KEYS, "num_local_experts", "rope_traditional"),
    required_keys=(*WIDTHS, "num_local_experts", "rms_norm_eps", "rope_theta"),
    defaults={"tie_word_embeddings": False},
    fixed={"norm_topk_prob": True, "attention_bias": False},
    experts_key="num_local_experts",
    stacked="model.layers.{layer}.block_sparse_moe.switch_mlp",
    per_expert="model.layers.{layer}.block_sparse_moe.experts.{expert}",
    per_expert_projections={"gate": "w1", "up": "w3", "down": "w2"},
    per_expert_components=("weight", "scales", "biases"),
    dropped_when_tied=("lm_head.weight",),
)
