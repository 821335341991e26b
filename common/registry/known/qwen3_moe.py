"""Qwen3-MoE: dense layers by `mlp_only_layers` and `decoder_sparse_step`, softmax routing."""

from __future__ import annotations

from titan.common.errors import CheckpointContradiction
from titan.common.registry.family import Config, Family, Module, attention, embeddings, mlp
from titan.common.registry.known.keys import COMMON_KEYS, COMMON_REQUIRED
from titan.common.registry.shape import MAX_LAYERS


def _is_moe(config: Config, layer: int) -> bool:
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
        *embeddings(),
        Module("model.layers.{layer}.mlp.gate", ("experts", "hidden"), "moe"),
        *attention(),
        Module("model.layers.{layer}.self_attn.q_norm", ("head",), "layer"),
        Module("model.layers.{layer}.self_attn.k_norm", ("head",), "layer"),
        *mlp("model.layers.{layer}.mlp", "dense", "dense"),
    ),
    computation_keys=(*COMMON_KEYS, "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    required_keys=(
        *COMMON_REQUIRED,
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
    is_moe=_is_moe,
    dropped_when_tied=("lm_head.weight",),
)
