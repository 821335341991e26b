"""Where each expert lies: the tensors of every expert found by name, every shape checked.

Two layouts are read: mlx's, one tensor [E, out, in] a projection, and Hugging Face's, one tensor an expert and
projection. Pure functions over tables of names; opens no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titan.common.errors import CheckpointContradiction, CheckpointMissing
from titan.common.registry.dimensions import Dimensions
from titan.common.registry.family import Family
from titan.common.registry.headers import TensorInfo
from titan.common.registry.quantization import QuantizationSettings, derive
from titan.common.registry.shape import COMPONENTS, ComponentSpec, LayerSpec, MatrixSpec

__all__ = ["ComponentRange", "ExpertLayer", "place_experts"]

Tensors = Mapping[str, TensorInfo]
_MEND = "Download or convert the model again"


@dataclass(frozen=True, slots=True)
class ComponentRange:
    """The bytes of one component of one expert's matrix: `nbytes` at `offset` of `file`."""

    matrix: str
    component: str
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Column:
    """One component over all experts of a layer: evenly strided in one tensor, or a tensor an expert."""

    matrix: str
    component: str
    nbytes: int
    tensors: tuple[TensorInfo, ...]

    def at(self, expert: int) -> ComponentRange:
        if len(self.tensors) == 1:
            tensor = self.tensors[0]
            return ComponentRange(
                self.matrix, self.component, tensor.file, tensor.offset + expert * self.nbytes, self.nbytes
            )
        tensor = self.tensors[expert]
        return ComponentRange(self.matrix, self.component, tensor.file, tensor.offset, self.nbytes)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A MoE layer: its shape and where its experts lie."""

    spec: LayerSpec
    stacked: bool
    columns: tuple[_Column, ...]

    def ranges(self, expert: int) -> tuple[ComponentRange, ...]:
        return tuple(column.at(expert) for column in self.columns)

    def names(self) -> Iterator[str]:
        return (tensor.name for column in self.columns for tensor in column.tensors)


def place_experts(
    family: Family, dims: Dimensions, settings: QuantizationSettings, tensors: Tensors
) -> dict[int, ExpertLayer]:
    """Find every (layer, expert, projection) -> layers by index.

    Raises:
        CheckpointMissing: a projection or an expert is absent.
        CheckpointContradiction: shapes differ from the config, from one another, or from the quantization settings.
    """
    return {layer: _place_layer(family, dims, settings, tensors, layer) for layer in dims.moe_layers}


def _place_layer(
    family: Family, dims: Dimensions, settings: QuantizationSettings, tensors: Tensors, layer: int
) -> ExpertLayer:
    module = family.stacked.format(layer=layer)
    single = [family.per_expert.format(layer=layer, expert=expert) for expert in range(dims.num_experts)]
    stacked = any(f"{module}.{name}.weight" in tensors for name in family.projections.values())
    alone = next(
        (
            f"{path}.{n}.weight"
            for path in single
            for n in family.names_alone.values()
            if f"{path}.{n}.weight" in tensors
        ),
        None,
    )
    if stacked and alone is not None:
        raise CheckpointContradiction(
            f"{tensors[alone].file} holds {alone}, but layer {layer} also has stacked experts under {module}", _MEND
        )
    matrices: list[MatrixSpec] = []
    columns: list[_Column] = []
    for matrix, projection in family.projections.items():
        own = family.names_alone[matrix]
        paths = [f"{module}.{projection}"] if stacked or alone is None else [f"{p}.{own}" for p in single]
        spec, found = _place_matrix(family, dims, tensors, matrix, paths, stacked or alone is None)
        path, first = f"{module}.{projection}", found[0].tensors[0]
        parts = {c.name: (c.dtype, c.shape) for c in spec.components}
        quantization = derive(
            f"{first.name} in {first.file}",
            spec.in_features,
            spec.out_features,
            parts["weight"],
            parts.get("scales"),
            parts.get("biases"),
        )
        settings.check(path, quantization, f"{first.name} in {first.file}", spec.in_features)
        if quantization is not None:
            spec = replace(spec, **asdict(quantization))
        matrices.append(spec)
        columns.extend(found)
    gate, up, down = matrices
    return ExpertLayer(LayerSpec(layer, module, (gate, up, down), family.activation), stacked, tuple(columns))


def _place_matrix(
    family: Family, dims: Dimensions, tensors: Tensors, matrix: str, paths: list[str], stacked: bool
) -> tuple[MatrixSpec, list[_Column]]:
    widths = (dims.hidden_size, dims.expert_width)
    in_features, out_features = widths[::-1] if matrix == "down" else widths
    expected = (*COMPONENTS[:3], *(("bias",) if dims.expert_bias else ()))
    if not stacked:
        expected = family.per_expert_components
    components: list[ComponentSpec] = []
    columns: list[_Column] = []
    for component in expected:
        found = [tensors.get(f"{path}.{component}") for path in paths]
        if all(tensor is None for tensor in found) and component not in ("weight", "bias"):
            continue
        present: list[TensorInfo] = []
        for path, tensor in zip(paths, found, strict=True):
            if tensor is None:
                raise CheckpointMissing(f"no shard holds {path}.{component}", _MEND)
            present.append(tensor)
        first = present[0]
        for tensor in present:
            if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
                raise CheckpointContradiction(
                    f"{tensor.name} in {tensor.file} is {tensor.dtype} {list(tensor.shape)}, "
                    f"but {first.name} is {first.dtype} {list(first.shape)}",
                    _MEND,
                )
        shape = first.shape
        if stacked:
            if not shape or shape[0] != dims.num_experts:
                raise CheckpointContradiction(
                    f"{first.name} in {first.file} has the shape {list(shape)}, "
                    f"but config.json says {family.experts_key} {dims.num_experts}",
                    _MEND,
                )
            shape = shape[1:]
        if component == "bias" and shape != (out_features,):
            raise CheckpointContradiction(
                f"{first.name} in {first.file} has the shape {list(first.shape)} for {out_features} outputs", _MEND
            )
        components.append(ComponentSpec(component, first.dtype, shape))
        nbytes = first.nbytes // dims.num_experts if stacked else first.nbytes
        columns.append(_Column(matrix, component, nbytes, tuple(present)))
    return MatrixSpec(matrix, in_features, out_features, tuple(components)), columns
