"""gpt-oss: biased experts with a clipped activation, attention sinks, a sliding window in every second layer."""

from __future__ import annotations

from titan.common.registry.family import Family, Module, attention, embeddings
from titan.common.registry.known.keys import SHARED_KEYS, WIDTHS

GPT_OSS = Family(
    model_type="gpt_oss",
    expert_width="intermediate_size",
    modules=(
        *embeddings(),
        *attention("attention_bias"),
        Module("model.layers.{layer}.self_attn", ("heads",), "layer", leaf="sinks"),
        Module("model.layers.{layer}.mlp.router", ("experts", "hidden"), "moe", "always"),
    ),
    computation_keys=(
        *SHARED_KEYS,
        "attention_bias",
        "head_dim",
        "layer_types",
        "num_local_experts",
        "sliding_window",
        "swiglu_limit",
    ),
    required_keys=(*WIDTHS, "num_local_experts", "head_dim", "rms_norm_eps", "rope_theta", "sliding_window"),
    defaults={},
    # Softmax over the chosen is softmax over all and renormalised; the rest is written into mlx-lm's class.
    fixed={"norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": False, "swiglu_limit": 7.0},
    experts_key="num_local_experts",
    sizes=lambda number: {"heads": number("num_attention_heads")},
    stacked="model.layers.{layer}.mlp.experts",
    activation="gpt_oss",
    expert_bias=True,
    router="router",
)
