"""Config keys that most families share."""

from __future__ import annotations

WIDTHS = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "num_experts_per_tok",
)
SHARED_KEYS = (
    "model_type",
    *WIDTHS,
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "tie_word_embeddings",
    "hidden_act",
    "quantize_activations",
)
COMMON_KEYS = (*SHARED_KEYS, "head_dim", "num_experts", "norm_topk_prob", "attention_bias")
COMMON_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "rms_norm_eps",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
)
