"""Between MLX arrays, numpy arrays and raw bytes, without copies where memory is shared.

bfloat16 has no numpy dtype: its bits travel as uint16. Knows nothing of experts or sockets.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from titan.common.errors import CheckpointContradiction

# safetensors' names -> (numpy dtype of the raw bits, MLX dtype)
DISK_DTYPES: dict[str, tuple[np.dtype, mx.Dtype]] = {
    "F32": (np.dtype("<f4"), mx.float32),
    "F16": (np.dtype("<f2"), mx.float16),
    "BF16": (np.dtype("<u2"), mx.bfloat16),
    "U32": (np.dtype("<u4"), mx.uint32),
    "U8": (np.dtype("u1"), mx.uint8),
}

# names used on the wire -> (numpy dtype of the raw bits, MLX dtype)
COMPUTE_DTYPES: dict[str, tuple[np.dtype, mx.Dtype]] = {
    "float32": (np.dtype("<f4"), mx.float32),
    "float16": (np.dtype("<u2"), mx.float16),
    "bfloat16": (np.dtype("<u2"), mx.bfloat16),
}


def compute_dtype(float_dtypes: set[str]) -> str:
    """Name of the dtype of activations on this device for a checkpoint whose float tensors are `float_dtypes`.

    On a CPU it is float32 whatever the checkpoint: `gather_qmm` in 16 bits measured 34 times slower there. On
    Metal and CUDA it is the checkpoint's own.

    Raises:
        CheckpointContradiction: the experts' float tensors do not agree on one dtype.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return "float32"
    names = {{"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[d] for d in float_dtypes}
    if len(names) > 1:
        raise CheckpointContradiction(
            f"the checkpoint mixes {' and '.join(sorted(names))} in its float tensors",
            "convert it with one --dtype",
        )
    return names.pop() if names else "bfloat16"


def raw_bits(array: mx.array) -> np.ndarray:
    """The memory of an array as numpy, evaluated and shared; 16-bit floats appear as uint16."""
    if array.dtype in (mx.bfloat16, mx.float16):
        array = array.view(mx.uint16)
    mx.eval(array)
    return np.asarray(memoryview(array))  # type: ignore[arg-type]  # mx.array has the buffer protocol, its stubs do not say so


def from_raw_bits(bits: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """An MLX array with the values whose raw bits are `bits` (copied once)."""
    array = mx.array(bits)
    return array if array.dtype == dtype else array.view(dtype)


def widen(bits: np.ndarray, disk_dtype: str, out: np.ndarray) -> None:
    """Convert raw bits of a 16-bit float dtype to float32, exactly, into `out` of the same shape."""
    if disk_dtype == "BF16":
        np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        np.copyto(out, bits.view("<f2"), casting="same_kind")
