"""The numbers of a config that decide shapes and routing, read and checked for its family. Knows no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from titan.common.errors import CheckpointContradiction, CheckpointMissing
from titan.common.registry.family import Config, Family
from titan.common.registry.shape import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH

__all__ = ["Dimensions", "absent_keys", "read_dimensions"]


@dataclass(frozen=True, slots=True)
class Dimensions:
    """A config's numbers, checked.

    Args:
        cache_width: elements that the KV cache keeps of a token in each layer.
        shared_experts: experts that every row passes through.
        sizes: what the shapes of `Module` name.
    """

    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    expert_width: int
    moe_layers: tuple[int, ...]
    normalise: bool
    tied: bool
    expert_bias: bool
    cache_width: int
    shared_experts: int
    sizes: Mapping[str, int]


def absent_keys(family: Family, config: Config) -> dict[str, object]:
    """The family's own values for the keys that the config leaves out.

    `rope_theta` is taken from `rope_parameters`, where newer configs keep it and mlx-lm does not look.

    Raises:
        CheckpointContradiction: the config gives two values for rope_theta.
    """
    values = {**family.defaults, **family.fixed}
    absent = {key: value for key, value in values.items() if config.get(key) is None}
    rope = config.get("rope_parameters")
    nested = rope.get("rope_theta") if isinstance(rope, dict) else None
    if nested is not None and config.get("rope_theta") is None:
        absent["rope_theta"] = nested
    elif nested is not None and config["rope_theta"] != nested:
        raise CheckpointContradiction(
            "config.json: rope_theta and rope_parameters.rope_theta differ", "Keep the model's original value"
        )
    return absent


def read_dimensions(family: Family, config: Config) -> Dimensions:
    """Check the numbers of a config that `absent_keys` completed.

    Raises:
        CheckpointMissing: a key that mlx-lm needs is absent.
        CheckpointContradiction: a value of another type or out of bounds, or one that mlx-lm does not compute.
    """
    for key in family.required_keys:
        if config.get(key) is None:
            raise CheckpointMissing(
                f"config.json has no {key}, which {family.model_type} needs", "Take the model's original config.json"
            )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointContradiction(
            f"config.json: hidden_act is {str(config['hidden_act'])[:40]!r}, but {family.model_type} computes silu",
            "This is another architecture under a known name",
        )
    for key, value in family.fixed.items():
        if config.get(key, value) != value:
            raise CheckpointContradiction(
                f"config.json: {key} is {str(config[key])[:40]!r}, but mlx-lm's {family.model_type} computes {value!r}",
                "This is another architecture under a known name",
            )
    layers = _number(config, "num_hidden_layers", MAX_LAYERS)
    experts = _number(config, family.experts_key, MAX_EXPERTS)
    hidden = _number(config, "hidden_size", MAX_WIDTH)
    heads = _number(config, "num_attention_heads", MAX_WIDTH)
    kv_heads = heads if config.get("num_key_value_heads") is None else _number(config, "num_key_value_heads", heads)
    head = hidden // heads if config.get("head_dim") is None else _number(config, "head_dim", MAX_WIDTH)
    moe_layers = tuple(layer for layer in range(layers) if family.is_moe(config, layer))
    if not moe_layers:
        raise CheckpointContradiction("config.json leaves no layer with experts", "A dense model needs no Titan")
    sizes = {
        "vocab": _number(config, "vocab_size", 1 << 24),
        "hidden": hidden,
        "experts": experts,
        "queries": heads * head,
        "keys": kv_heads * head,
        "head": head,
        "dense": _number(config, "intermediate_size", MAX_WIDTH),
        "always": 1,
        "attention_bias": int(_flag(config, "attention_bias")),
        **family.sizes(lambda key: _number_or_none(config, key)),
    }
    return Dimensions(
        num_layers=layers,
        num_experts=experts,
        top_k=_number(config, "num_experts_per_tok", experts),
        hidden_size=hidden,
        expert_width=_number(config, family.expert_width, MAX_WIDTH),
        moe_layers=moe_layers,
        normalise=_flag(config, "norm_topk_prob"),
        tied=_flag(config, "tie_word_embeddings"),
        expert_bias=family.expert_bias or ("mlp_bias" in family.computation_keys and _flag(config, "mlp_bias")),
        cache_width=sum(sizes[name] for name in family.cache),
        shared_experts=_number_or_none(config, "n_shared_experts"),
        sizes=sizes,
    )


def _number_or_none(config: Config, key: str) -> int:
    """0 when the key is absent, null, false or 0."""
    value = config.get(key)
    if value is None or value is False or value == 0:
        return 0
    return 1 if value is True else _number(config, key, MAX_WIDTH)


def _number(config: Config, key: str, high: int) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= high:
        raise CheckpointContradiction(
            f"config.json: {key} is {str(value)[:40]!r}, not a whole number in 1..{high}",
            "Take the model's original config.json",
        )
    return value


def _flag(config: Config, key: str) -> bool:
    value = config.get(key)
    if type(value) is not bool:
        raise CheckpointContradiction(
            f"config.json: {key} is {str(value)[:40]!r}, not true or false", "Take the model's original config.json"
        )
    return value
