"""What Titan must know of a model family, as data: config keys, tensor names, which layers are MoE, how it routes.

Names are expanded from templates and looked up whole, so nothing that merely resembles one can match (Ling's
`gate.gate_proj` is no expert's `gate_proj`). Knows no family by name; those are in `titan.common.registry.known`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Config", "Family", "Module", "attention", "embeddings", "every_layer", "mlp"]

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Module:
    """A module outside the experts: `path` with {layer}, `shape` in names of `Dimensions.sizes`.

    Args:
        where: "once", "layer" (every layer), "moe" or "dense" (layers of that kind), "head" (unless tied).
        bias: the size that says whether the module has a `.bias` ("always" is 1); "" for never.
        leaf: the parameter's own name.
        needs: a size; without it (0) the module does not exist.
        lacks: a size; with it the module does not exist.
        older: path of the module that older conversions have in its place, and `older_shape` its shape; mlx-lm
            splits it when it loads.
    """

    path: str
    shape: tuple[str, ...]
    where: str
    bias: str = ""
    leaf: str = "weight"
    needs: str = ""
    lacks: str = ""
    older: str = ""
    older_shape: tuple[str, ...] = ()


def every_layer(_config: Config, _layer: int) -> bool:
    return True


def _no_sizes(_number: Callable[[str], int]) -> Mapping[str, int]:
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the verified table.

    Args:
        model_type: as in config.json, and the name of mlx-lm's file.
        expert_width: config key of an expert's width.
        modules: every module outside the experts.
        computation_keys: config keys that change what is computed; they enter the fingerprint.
        required_keys: keys whose absence nobody may fill in.
        defaults: the family's own values for absent keys, never a global one.
        fixed: keys for which mlx-lm's class computes this one value only; another is refused.
        aliases: other names in `model_type` that mlx-lm runs with this class.
        experts_key: config key of the number of experts.
        is_moe: whether a layer has experts.
        sizes: further sizes, from a function that reads a config key as a number (0 when absent, null or false).
        cache: sizes whose sum is the number of KV elements a token and layer.
        stacked, per_expert: paths of the experts' module, [E, out, in] tensors or one tensor an expert.
        projections: names of the matrices in the stacked layout and in packs.
        per_expert_projections: in the per-expert layout, where they differ.
        per_expert_components: what mlx-lm stacks when it reads the per-expert layout.
        activation: what stands between up, gate and down: "silu" or "gpt_oss".
        expert_bias: whether experts' matrices always have biases.
        router: path of the router within the MoE block.
        scoring: "softmax": over all experts, then top-k; "sigmoid": of each logit, top-k after a correction bias.
        correction: path of that bias within the block.
        dropped_when_tied: tensors that mlx-lm ignores when the head is tied to the embedding.
    """

    model_type: str
    expert_width: str
    modules: tuple[Module, ...]
    computation_keys: tuple[str, ...]
    required_keys: tuple[str, ...]
    defaults: Mapping[str, object]
    fixed: Mapping[str, object] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    experts_key: str = "num_experts"
    is_moe: Callable[[Config, int], bool] = every_layer
    sizes: Callable[[Callable[[str], int]], Mapping[str, int]] = _no_sizes
    cache: tuple[str, ...] = ("keys", "keys")
    stacked: str = "model.layers.{layer}.mlp.switch_mlp"
    per_expert: str = "model.layers.{layer}.mlp.experts.{expert}"
    projections: Mapping[str, str] = field(
        default_factory=lambda: {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    )
    per_expert_projections: Mapping[str, str] | None = None
    per_expert_components: tuple[str, ...] = ("weight",)
    activation: str = "silu"
    expert_bias: bool = False
    router: str = "gate"
    scoring: str = "softmax"
    correction: str = ""
    dropped_when_tied: tuple[str, ...] = ()

    @property
    def names_alone(self) -> Mapping[str, str]:
        """Names of the matrices in the per-expert layout."""
        return self.per_expert_projections or self.projections


def attention(bias: str = "", output_bias: str | None = None) -> tuple[Module, ...]:
    """Query, key, value and output projections; `output_bias` where it differs from the others' `bias`."""
    path = "model.layers.{layer}.self_attn."
    return (
        Module(f"{path}q_proj", ("queries", "hidden"), "layer", bias),
        Module(f"{path}k_proj", ("keys", "hidden"), "layer", bias),
        Module(f"{path}v_proj", ("keys", "hidden"), "layer", bias),
        Module(f"{path}o_proj", ("hidden", "queries"), "layer", bias if output_bias is None else output_bias),
    )


def embeddings() -> tuple[Module, ...]:
    """Embedding, head and the norms that every family has."""
    return (
        Module("model.embed_tokens", ("vocab", "hidden"), "once"),
        Module("model.norm", ("hidden",), "once"),
        Module("lm_head", ("vocab", "hidden"), "head"),
        Module("model.layers.{layer}.input_layernorm", ("hidden",), "layer"),
        Module("model.layers.{layer}.post_attention_layernorm", ("hidden",), "layer"),
    )


def mlp(path: str, width: str, where: str, needs: str = "") -> tuple[Module, ...]:
    """A dense SwiGLU block: a dense layer's, or shared experts."""
    return (
        Module(f"{path}.gate_proj", (width, "hidden"), where, needs=needs),
        Module(f"{path}.up_proj", (width, "hidden"), where, needs=needs),
        Module(f"{path}.down_proj", ("hidden", width), where, needs=needs),
    )
