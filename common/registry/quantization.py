"""Bits, group size and mode of a matrix: derived from the shapes on disk, then held against the config.

mlx-lm takes an override in config["quantization"][path] as it is and infers every other quantized matrix from its
shapes. What passes here is therefore executed by mlx-lm with the same numbers. Knows neither files nor families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from titan.common.errors import CheckpointContradiction, UnsupportedFamily

__all__ = ["Quantization", "QuantizationSettings", "derive", "read_settings"]

MODE_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # group size, bits
AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
MODE_OF_U8_SCALES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}  # by (bits, group size)
FLOATS = ("F32", "F16", "BF16")
_MEND = "Convert the model again with mlx_lm.convert, or correct `quantization` in config.json"

TensorLike = tuple[str, tuple[int, ...]]  # dtype, shape without the experts' axis


@dataclass(frozen=True, slots=True)
class Quantization:
    """How one matrix is packed; equal values compute alike."""

    bits: int
    group_size: int
    mode: str

    def __str__(self) -> str:
        return f"{self.bits}-bit {self.mode}, group {self.group_size}"


@dataclass(frozen=True, slots=True)
class QuantizationSettings:
    """What the config says: one setting for all and exceptions by module path (None: not quantized)."""

    default: Quantization | None
    overrides: Mapping[str, Quantization | None]

    def check(self, module_path: str, derived: Quantization | None, tensor: str, in_features: int) -> None:
        """Hold what the shapes of `tensor` say against what the config says of its module.

        An override whose path differs by a prefix only ("language_model.model...") is taken for this module too.

        Raises:
            CheckpointContradiction: they differ; the message names both.
        """
        said, where = self.default, "quantization"
        path = module_path if module_path in self.overrides else self._renamed(module_path)
        if path is not None:
            said, where = self.overrides[path], f"quantization[{path!r}]"
        elif derived is None:
            return  # the global setting does not say that everything is quantized
        if derived != said:
            raise CheckpointContradiction(
                f"config.json says in {where} that {module_path} is {said or 'not quantized'}, "
                f"but the shapes of {tensor} say {derived or 'not quantized'} for its {in_features} inputs",
                _MEND,
            )

    def _renamed(self, module_path: str) -> str | None:
        return next((path for path in self.overrides if path.endswith(f".{module_path}")), None)


def read_settings(config: Mapping[str, object]) -> QuantizationSettings:
    """Read `quantization` and compare it with its mirror `quantization_config`.

    Raises:
        CheckpointContradiction: a setting is malformed, or the two differ.
        UnsupportedFamily: a quantization that is not mlx's (fp8, AWQ, GPTQ, ...).
    """
    raw, mirror = config.get("quantization"), config.get("quantization_config")
    if raw is None:
        if mirror is None:
            return QuantizationSettings(None, {})
        method = mirror.get("quant_method") if isinstance(mirror, dict) else None
        if isinstance(method, str):
            raise UnsupportedFamily(
                f"config.json names the quantization {method[:40]!r}, which Titan does not read",
                "Convert the model with mlx_lm.convert, which writes mlx's own quantization",
            )
        raise CheckpointContradiction(
            "config.json has quantization_config but no quantization, which is what mlx-lm reads",
            "Copy it to `quantization` or convert the model again",
        )
    if not isinstance(raw, dict):
        raise CheckpointContradiction(f"config.json: quantization is {str(raw)[:40]!r}, not an object", _MEND)
    settings = _settings(raw)
    if isinstance(mirror, dict) and "quant_method" not in mirror and "bits" in mirror and _settings(mirror) != settings:
        raise CheckpointContradiction(
            "config.json: quantization and quantization_config say different things",
            "Keep the one that fits the tensors",
        )
    return settings


def _settings(raw: Mapping[str, object]) -> QuantizationSettings:
    if raw.get("bits") is None or raw.get("group_size") is None:  # mlx-lm has defaults for overrides only
        raise CheckpointContradiction("config.json: quantization lacks bits or group_size", _MEND)
    default = _setting("quantization", raw)
    overrides: dict[str, Quantization | None] = {}
    for path, value in raw.items():
        if isinstance(value, dict):
            if value.get("global_scale"):
                raise UnsupportedFamily(
                    f"config.json gives {path[:120]} an nvfp4 global_scale, which Titan does not execute yet",
                    "Convert the model again without global scales",
                )
            overrides[path] = _setting(f"quantization[{path[:120]!r}]", value)
        elif isinstance(value, bool):
            overrides[path] = default if value else None
    return QuantizationSettings(default, overrides)


def _setting(where: str, raw: Mapping[str, object]) -> Quantization:
    mode = raw.get("mode", "affine")  # an override without a mode is affine, whatever the global mode is
    if not isinstance(mode, str) or mode not in MODE_DEFAULTS:
        raise CheckpointContradiction(
            f"config.json: {where} has mode {str(mode)[:40]!r}, known are {', '.join(MODE_DEFAULTS)}", _MEND
        )
    group_size, bits = MODE_DEFAULTS[mode]
    values = []
    for key, default in (("bits", bits), ("group_size", group_size)):
        value = raw.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= 1 << 16:
            raise CheckpointContradiction(f"config.json: {where} has {key} {str(value)[:40]!r}", _MEND)
        values.append(value)
    return Quantization(values[0], values[1], mode)


def derive(
    tensor: str,
    in_features: int,
    out_features: int,
    weight: TensorLike,
    scales: TensorLike | None,
    biases: TensorLike | None,
) -> Quantization | None:
    """Bits, group size and mode of a matrix [out_features, in_features] from its tensors; None when unquantized.

    Args:
        tensor: the weight's name, for the message.
        weight: U32 [out, in * bits / 32], or float [out, in].
        scales: float (affine) or U8 [out, in / group], None when there are none.
        biases: zero points, of the same dtype and shape as the scales; None when there are none.

    Raises:
        CheckpointContradiction: the shapes fit no quantization of a matrix of this size.
        UnsupportedFamily: a dtype that is not executed (FP8 and the like).
    """
    dtype, shape = weight
    expected = f"a matrix of {out_features} x {in_features}, as config.json has it"
    if len(shape) != 2 or shape[0] != out_features:
        raise CheckpointContradiction(f"{tensor} has the shape {list(shape)}, which is not {expected}", _MEND)
    if scales is None:
        if dtype in FLOATS and biases is None:
            if shape[1] != in_features:
                raise CheckpointContradiction(f"{tensor} has the shape {list(shape)}, which is not {expected}", _MEND)
            return None
        if dtype in FLOATS or dtype == "U32":
            raise CheckpointContradiction(f"{tensor} is {dtype} and has no scales beside it", _MEND)
        raise UnsupportedFamily(
            f"{tensor} has dtype {dtype}; Titan executes BF16, F16, F32 and mlx's U32 packing", _MEND
        )
    scales_dtype, scales_shape = scales
    if dtype != "U32":
        raise CheckpointContradiction(f"{tensor} has scales, so it should be U32, but it is {dtype}", _MEND)
    if len(scales_shape) != 2 or scales_shape[0] != out_features or not scales_shape[1]:
        raise CheckpointContradiction(
            f"the scales of {tensor} have the shape {list(scales_shape)}, which does not fit {expected}", _MEND
        )
    bits, odd_bits = divmod(shape[1] * 32, in_features)
    group_size, odd_group = divmod(in_features, scales_shape[1])
    mode = "affine" if scales_dtype in FLOATS else MODE_OF_U8_SCALES.get((bits, group_size), "")
    known = (bits in AFFINE_BITS and group_size in AFFINE_GROUPS) if mode == "affine" else bool(mode)
    if odd_bits or odd_group or not known or (scales_dtype not in FLOATS and scales_dtype != "U8"):
        raise CheckpointContradiction(
            f"{tensor} U32 {list(shape)} with {scales_dtype} scales {list(scales_shape)} is no quantization of "
            f"{expected} ({shape[1] * 32 / in_features:g} bits, groups of {in_features / scales_shape[1]:g})",
            _MEND,
        )
    if (biases is None) == (mode == "affine"):
        raise CheckpointContradiction(
            f"{tensor} is {mode} by its shapes but has {'no biases' if biases is None else 'biases'} beside it", _MEND
        )
    if biases is not None and biases != scales:
        raise CheckpointContradiction(
            f"the biases of {tensor} are {biases[0]} {list(biases[1])}, "
            f"but its scales are {scales_dtype} {list(scales_shape)}",
            _MEND,
        )
    return Quantization(bits, group_size, mode)
