"""Bits, group size and mode follow from what mx.quantize itself makes, and from nothing that it does not."""

from __future__ import annotations

import mlx.core as mx
import pytest

from titan.common.errors import CheckpointContradiction, UnsupportedFamily
from titan.common.registry.quantization import MODE_DEFAULTS, Quantization, derive, read_settings

NAMES = {mx.uint32: "U32", mx.uint8: "U8", mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32"}
IN, OUT = 384, 8
AFFINE = [(bits, group, "affine") for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
OTHERS = [(bits, group, mode) for mode, (group, bits) in MODE_DEFAULTS.items() if mode != "affine"]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(("bits", "group_size", "mode"), AFFINE + OTHERS)
def test_every_quantization_of_mlx(bits: int, group_size: int, mode: str, dtype: mx.Dtype) -> None:
    weight, scales, *biases = mx.quantize(mx.ones((OUT, IN), dtype), group_size, bits, mode=mode)
    weight, scales, *biases = [(NAMES[array.dtype], array.shape) for array in (weight, scales, *biases)]
    derived = derive("w", IN, OUT, weight, scales, *biases or [None])
    assert derived == Quantization(bits, group_size, mode)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_unquantized(dtype: str) -> None:
    assert derive("w", IN, OUT, (dtype, (OUT, IN)), None, None) is None


U32 = ("U32", (OUT, IN // 8))
SCALES = ("BF16", (OUT, IN // 64))


@pytest.mark.parametrize(
    ("weight", "scales", "biases"),
    [
        (("U32", (OUT, 49)), SCALES, True),  # not a whole number of bits
        (("U32", (OUT, 7 * IN // 32)), SCALES, True),  # 7 bits
        (("U32", (OUT, 0)), SCALES, True),
        (("U32", (OUT + 1, IN // 8)), SCALES, True),
        (("U32", (IN // 8,)), SCALES, True),
        (U32, ("BF16", (OUT, 5)), True),  # 384 is not a multiple of 5 groups
        (U32, ("BF16", (OUT, IN // 16)), True),  # affine has no groups of 16
        (U32, ("BF16", (OUT, IN // 256 or 1)), True),
        (U32, ("BF16", (OUT, 0)), True),
        (U32, ("BF16", (OUT,)), True),
        (U32, ("U8", (OUT, IN // 64)), False),  # no mode with 4 bits in groups of 64
        (U32, ("F8_E4M3", (OUT, IN // 16)), False),
        (U32, ("U8", (OUT, IN // 32)), True),  # mxfp4 with zero points
        (U32, SCALES, False),  # affine without
        (U32, SCALES, ("F32", SCALES[1])),
        (U32, SCALES, (SCALES[0], (OUT, 1))),
        (U32, None, None),
        (("BF16", (OUT, IN)), SCALES, True),
        (("BF16", (OUT, IN)), None, True),
        (("BF16", (IN, OUT)), None, None),
        (("BF16", (OUT, IN, 1)), None, None),
    ],
)
def test_shapes_that_are_no_quantization(weight: tuple, scales: tuple | None, biases: tuple | bool) -> None:
    zero_points = (scales or SCALES if biases else None) if isinstance(biases, bool) else biases
    with pytest.raises(CheckpointContradiction, match=r"blocks\.w"):
        derive("blocks.w", IN, OUT, weight, scales, zero_points)


def test_dtypes_that_are_not_executed() -> None:
    with pytest.raises(UnsupportedFamily, match="F8_E4M3"):
        derive("w", IN, OUT, ("F8_E4M3", (OUT, IN)), None, None)


def test_settings_as_mlx_lm_reads_them() -> None:
    settings = read_settings(
        {
            "quantization": {
                "group_size": 32,
                "bits": 4,
                "mode": "mxfp4",
                "a": {"bits": 8, "group_size": 64},
                "b": {"bits": 8},
                "c": {"mode": "nvfp4"},
                "d": False,
                "e": True,
            }
        }
    )
    assert settings.default == Quantization(4, 32, "mxfp4")
    assert settings.overrides == {
        "a": Quantization(8, 64, "affine"),
        "b": Quantization(8, 64, "affine"),
        "c": Quantization(4, 16, "nvfp4"),
        "d": None,
        "e": Quantization(4, 32, "mxfp4"),
    }


def test_global_scales_are_refused() -> None:
    with pytest.raises(UnsupportedFamily, match="global_scale"):
        read_settings(
            {
                "quantization": {
                    "bits": 4,
                    "group_size": 16,
                    "mode": "nvfp4",
                    "a": {"mode": "nvfp4", "global_scale": True},
                }
            }
        )
