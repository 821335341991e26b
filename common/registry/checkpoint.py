"""Open a checkpoint: config.json and safetensors headers -> shape, routing, and where every expert's bytes lie.

No tensor is loaded; the fingerprint samples a few MiB. What does not open is refused with the file and the tensor
that are wrong. Knows neither MLX nor memory; reading experts is the store's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from titan.common.registry.bounded_json import read_object
from titan.common.registry.dimensions import absent_keys, read_dimensions
from titan.common.registry.families import family_of
from titan.common.registry.fingerprint import fingerprint
from titan.common.registry.headers import TensorInfo
from titan.common.registry.layout import ComponentRange, ExpertLayer, place_experts
from titan.common.registry.location import locate
from titan.common.registry.non_experts import check_others
from titan.common.registry.packed import PackedLayer, PackManifest, check_seal, place_packed, read_manifest
from titan.common.registry.quantization import read_settings
from titan.common.registry.shape import ModelShape
from titan.common.registry.shards import Shard, read_shards

__all__ = ["Checkpoint", "Routing", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How the router's logits become experts and scores.

    Args:
        scoring: "softmax": softmax over all experts, then the top_k largest; "sigmoid": of each logit, then the top_k
            largest after a correction bias.
        normalise: whether the chosen scores are divided by their sum.
        shared_experts: experts every row passes through; dense, they stay with the coordinator.
    """

    scoring: str
    top_k: int
    normalise: bool
    shared_experts: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An opened checkpoint; nothing of it changes.

    Args:
        path: the model directory.
        config: config.json as it is on disk.
        config_defaults: the family's own values for absent keys; pass them as mlx-lm's `model_config`.
        dense_layers: indices of the layers without experts.
        non_expert_tensors: every tensor that is not an expert's, by name.
        cache_width: elements that the KV cache keeps of a token in each layer.
        pack: the manifest when the experts are packed; the fingerprint is then that of the packed checkpoint.
    """

    path: Path
    shape: ModelShape
    routing: Routing
    config: Mapping[str, object]
    config_defaults: Mapping[str, object]
    dense_layers: tuple[int, ...]
    shards: tuple[Shard, ...]
    expert_tensor_names: frozenset[str]
    non_expert_tensors: tuple[TensorInfo, ...]
    cache_width: int
    _layers: Mapping[int, ExpertLayer] | Mapping[int, PackedLayer] = field(repr=False)
    pack: PackManifest | None = None

    def ranges(self, layer: int, expert: int) -> tuple[ComponentRange, ...]:
        """Where expert `expert` of layer `layer` lies, in the order of the shape's matrices and components.

        Raises:
            KeyError: the layer has no experts, or fewer, or a pack does not hold this one.
        """
        if not 0 <= expert < self.shape.num_experts:
            raise KeyError((layer, expert))
        return self._layers[layer].ranges(expert)

    def is_stacked(self, layer: int) -> bool:
        """Whether a layer's experts lie in one tensor [E, out, in] a projection (mlx), not one an expert."""
        return self._layers[layer].stacked

    @property
    def expert_bytes_total(self) -> int:
        return self.shape.expert_bytes_total

    @property
    def non_expert_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.non_expert_tensors)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the model directory `path`, or `org/name` from the local Hugging Face cache.

    Raises:
        CheckpointMissing, CheckpointTruncated, CheckpointContradiction, CheckpointChanged, UnsupportedFamily
    """
    directory = locate(path)
    config = read_object(directory / "config.json", "Give the folder of a model, with its original config.json")
    family = family_of(config)
    defaults = absent_keys(family, config)
    completed = {**config, **defaults}
    dims = read_dimensions(family, completed)
    settings = read_settings(config)
    shards, tensors = read_shards(directory)
    manifest = read_manifest(directory)
    identities = {shard.path: shard.identity for shard in shards}
    content = fingerprint(completed, family.computation_keys, tensors, identities)
    if manifest is None:
        layers = place_experts(family, dims, settings, tensors)
        shape = ModelShape(
            fingerprint=content,
            family=family.model_type,
            hidden_size=dims.hidden_size,
            num_experts=dims.num_experts,
            top_k=dims.top_k,
            num_layers=dims.num_layers,
            layers=tuple(layer.spec for layer in layers.values()),
        )
        expert_names = frozenset(name for layer in layers.values() for name in layer.names())
        others = check_others(family, dims, settings, tensors, expert_names)
    else:
        check_seal(directory, manifest, content)
        shape = manifest.shape
        layers, expert_shards = place_packed(directory, manifest, family)
        shards += expert_shards
        expert_names = frozenset(name for layer in layers.values() for name in layer.names())
        others = check_others(family, dims, settings, tensors, frozenset())
    return Checkpoint(
        path=directory,
        shape=shape,
        routing=Routing(family.scoring, dims.top_k, dims.normalise, dims.shared_experts),
        config=config,
        config_defaults=defaults,
        dense_layers=tuple(layer for layer in range(dims.num_layers) if layer not in layers),
        shards=shards,
        expert_tensor_names=expert_names,
        non_expert_tensors=others,
        cache_width=dims.cache_width,
        _layers=layers,
        pack=manifest,
    )
