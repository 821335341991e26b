"""MiniMax-M2: every layer MoE, sigmoid routing with a correction bias, chosen scores renormalised."""

from __future__ import annotations

from titan.common.registry.family import Family, Module, attention, embeddings
from titan.common.registry.known.keys import SHARED_KEYS, WIDTHS

_BLOCK = "model.layers.{layer}.block_sparse_moe"

MINIMAX = Family(
    model_type="minimax",
    aliases=("minimax_m2",),
    expert_width="intermediate_size",
    modules=(
        *embeddings(),
        Module(f"{_BLOCK}.gate", ("experts", "hidden"), "moe"),
        Module(_BLOCK, ("experts",), "moe", leaf="e_score_correction_bias"),
        *attention(),
        Module("model.layers.{layer}.self_attn.q_norm", ("queries",), "layer", needs="qk_norm"),
        Module("model.layers.{layer}.self_attn.k_norm", ("keys",), "layer", needs="qk_norm"),
    ),
    computation_keys=(
        *SHARED_KEYS,
        "head_dim",
        "num_local_experts",
        "shared_intermediate_size",
        "rotary_dim",
        "scoring_func",
        "use_qk_norm",
    ),
    required_keys=(*WIDTHS, "num_local_experts", "rms_norm_eps", "rope_theta", "rotary_dim", "max_position_embeddings"),
    defaults={"tie_word_embeddings": False, "use_qk_norm": True, "shared_intermediate_size": 0},
    fixed={"norm_topk_prob": True, "attention_bias": False, "scoring_func": "sigmoid"},
    experts_key="num_local_experts",
    sizes=lambda number: {"qk_norm": number("use_qk_norm")},
    stacked=f"{_BLOCK}.switch_mlp",
    per_expert=f"{_BLOCK}.experts.{{expert}}",
    per_expert_projections={"gate": "w1", "up": "w3", "down": "w2"},
    scoring="sigmoid",
    correction="e_score_correction_bias",
)
