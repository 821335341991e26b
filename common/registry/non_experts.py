"""Everything of a checkpoint that is no expert: each tensor the family names is there, and nothing else is.

mlx-lm loads strictly, so a tensor without a place would stop it too, with less of an explanation. Opens no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from titan.common.errors import CheckpointContradiction, CheckpointMissing
from titan.common.registry.dimensions import Dimensions
from titan.common.registry.family import Family, Module
from titan.common.registry.headers import TensorInfo
from titan.common.registry.quantization import QuantizationSettings, derive

__all__ = ["check_others", "expected_modules"]

Tensors = Mapping[str, TensorInfo]
_MEND = "Download or convert the model again"


def check_others(
    family: Family, dims: Dimensions, settings: QuantizationSettings, tensors: Tensors, expert_names: frozenset[str]
) -> tuple[TensorInfo, ...]:
    """Check every tensor outside the experts against the family's modules -> those tensors, by name.

    Raises:
        CheckpointMissing: one is absent.
        CheckpointContradiction: one has another shape, or a tensor has no place in this model.
    """
    known: set[str] = set()
    for expected in expected_modules(family, dims):
        path, leaf, shape = expected.path, expected.leaf, expected.shape
        if expected.older is not None and f"{path}.{leaf}" not in tensors and f"{expected.older[0]}.{leaf}" in tensors:
            path, shape = expected.older
        weight = tensors.get(f"{path}.{leaf}")
        if weight is None:
            raise CheckpointMissing(f"no shard holds {path}.{leaf}", _MEND)
        known.add(weight.name)
        if len(shape) == 1:
            _check_shape(weight, shape)
            continue
        scales, biases = tensors.get(f"{path}.scales"), tensors.get(f"{path}.biases")
        known.update(t.name for t in (scales, biases) if t is not None)
        for stacked in (t for t in (weight, scales, biases) if t is not None and len(shape) == 3):
            if len(stacked.shape) != 3 or stacked.shape[0] != shape[0]:
                _check_shape(stacked, shape)
        quantization = derive(
            f"{weight.name} in {weight.file}",
            shape[-1],
            shape[-2],
            (weight.dtype, weight.shape[len(shape) - 2 :]),
            None if scales is None else (scales.dtype, scales.shape[len(shape) - 2 :]),
            None if biases is None else (biases.dtype, biases.shape[len(shape) - 2 :]),
        )
        settings.check(path, quantization, f"{weight.name} in {weight.file}", shape[-1])
        if expected.bias:
            if f"{path}.bias" not in tensors:
                raise CheckpointMissing(f"no shard holds {path}.bias, though config.json sets attention_bias", _MEND)
            known.add(f"{path}.bias")
    if dims.tied:
        known.update(name for name in family.dropped_when_tied if name in tensors)
    for name in sorted(tensors.keys() - expert_names - known):
        raise CheckpointContradiction(
            f"{tensors[name].file} holds {name}, which has no place in this model: {_why(name, dims)}",
            "Give the config.json that belongs to these files, or convert the model again",
        )
    return tuple(tensors[name] for name in sorted(known))


@dataclass(frozen=True, slots=True)
class Expected:
    """A module of this model: the shape of its unquantized weight, and what older conversions have instead."""

    path: str
    leaf: str
    shape: tuple[int, ...]
    bias: bool
    older: tuple[str, tuple[int, ...]] | None = None


def expected_modules(family: Family, dims: Dimensions) -> Iterator[Expected]:
    """Every module outside the experts."""
    moe = set(dims.moe_layers)
    for module in family.modules:
        if (module.needs and not dims.sizes[module.needs]) or (module.lacks and dims.sizes[module.lacks]):
            continue
        if module.where == "once" or (module.where == "head" and not dims.tied):
            yield _expected(module, dims, 0)
        elif module.where in ("layer", "moe", "dense"):
            for layer in range(dims.num_layers):
                if module.where == "layer" or (layer in moe) == (module.where == "moe"):
                    yield _expected(module, dims, layer)


def _expected(module: Module, dims: Dimensions, layer: int) -> Expected:
    older = None
    if module.older:
        older = module.older.format(layer=layer), tuple(dims.sizes[size] for size in module.older_shape)
    return Expected(
        module.path.format(layer=layer),
        module.leaf,
        tuple(dims.sizes[size] for size in module.shape),
        bool(module.bias and dims.sizes[module.bias]),
        older,
    )


def _check_shape(tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointContradiction(
            f"{tensor.name} in {tensor.file} has the shape {list(tensor.shape)}, but config.json means {list(shape)}",
            _MEND,
        )


def _why(name: str, dims: Dimensions) -> str:
    parts = name.split(".")
    if parts[0] == "lm_head" and dims.tied:
        return "config.json ties the head to the embedding"
    for what, count in (("layers", dims.num_layers), ("experts", dims.num_experts)):
        number = parts[parts.index(what) + 1] if what in parts[:-1] else ""
        if number.isascii() and number.isdigit() and int(number[:9]) >= count:
            return f"config.json says {count} {what}"
    if name.endswith(".global_scale"):
        return "Titan does not execute nvfp4 global scales yet"
    return "mlx-lm's class has no such parameter"
