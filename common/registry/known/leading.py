"""What families of DeepSeek's kind share: dense layers first, experts in groups, shared experts beside them."""

from __future__ import annotations

from titan.common.errors import CheckpointContradiction
from titan.common.registry.family import Config

GROUPED_KEYS = (
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "scoring_func",
    "topk_method",
)


def after_dense_layers(config: Config, layer: int) -> bool:
    """Layers from `first_k_dense_replace` on are MoE, every `moe_layer_freq`-th of them if that is set.

    Raises:
        CheckpointContradiction: either is no whole number.
    """
    first, step = config["first_k_dense_replace"], config.get("moe_layer_freq", 1)
    for key, value, least in (("first_k_dense_replace", first, 0), ("moe_layer_freq", step, 1)):
        if type(value) is not int or not least <= value <= 1 << 16:
            raise CheckpointContradiction(
                f"config.json: {key} is {str(value)[:40]!r}, not a whole number from {least} on", "Correct it"
            )
    assert isinstance(first, int)
    assert isinstance(step, int)
    return layer >= first and layer % step == 0
