"""The memory behind one layer's slots: stacked MLX buffers of mlx-lm's shapes, writable through numpy views.

Must be created on the thread that owns MLX; the views may be written from any thread. Knows nothing of which expert
is where.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from titan.common.arrays import COMPUTE_DTYPES, DISK_DTYPES, raw_bits
from titan.common.registry.shape import ComponentSpec, LayerSpec, MatrixSpec


def slot_dtype(component: ComponentSpec, compute_dtype: str) -> mx.Dtype:
    """The dtype a component has in a slot: the disk's, but float32 for floats where we compute in float32 (CPU)."""
    dtype = DISK_DTYPES[component.dtype][1]
    if compute_dtype == "float32" and dtype in (mx.float16, mx.bfloat16):
        return mx.float32
    return dtype


def slot_bytes(layer: LayerSpec, compute_dtype: str) -> int:
    """Bytes one expert of `layer` occupies in memory (b of constraint (mem); more than on disk where floats widen)."""
    return sum(
        math.prod(c.shape) * slot_dtype(c, compute_dtype).size for matrix in layer.matrices for c in matrix.components
    )


class MatrixBuffers:
    """One projection of all slots: arrays [capacity, *component shape] by component name."""

    def __init__(self, spec: MatrixSpec, capacity: int, compute_dtype: str) -> None:
        self.spec = spec
        self.arrays: dict[str, mx.array] = {}
        self.views: list[np.ndarray] = []
        for component in spec.components:
            dtype = slot_dtype(component, compute_dtype)
            shape = (capacity, *component.shape)
            if dtype == mx.bfloat16 or dtype == mx.float16:
                bits = mx.zeros(shape, mx.uint16)
                view, array = raw_bits(bits), bits.view(dtype)
                mx.eval(array)  # shares the memory of `bits`
            else:
                array = mx.zeros(shape, dtype)
                view = raw_bits(array)
            self.arrays[component.name] = array
            self.views.append(view)

    def __call__(self, x: mx.array, slots: mx.array, sort: bool) -> mx.array:
        """x: [..., 1, in], slots: [...] of uint32 -> [..., 1, out], as mlx-lm's (Quantized)SwitchLinear does."""
        arrays = self.arrays
        if self.spec.mode is None:
            y = mx.gather_mm(x, arrays["weight"].swapaxes(-1, -2), rhs_indices=slots, sorted_indices=sort)
        else:
            y = mx.gather_qmm(
                x,
                arrays["weight"],
                arrays["scales"],
                arrays.get("biases"),
                rhs_indices=slots,
                transpose=True,
                group_size=self.spec.group_size,
                bits=self.spec.bits,
                mode=self.spec.mode,
                sorted_indices=sort,
            )
        if "bias" in arrays:
            y = y + mx.expand_dims(arrays["bias"][slots], -2)
        return y


class LayerBuffers:
    """Gate, up and down of all slots of a layer."""

    def __init__(self, layer: LayerSpec, capacity: int, compute_dtype: str) -> None:
        self.layer = layer
        self.capacity = capacity
        self.dtype = COMPUTE_DTYPES[compute_dtype][1]
        self.nbytes = capacity * slot_bytes(layer, compute_dtype)
        self.gate, self.up, self.down = (MatrixBuffers(m, capacity, compute_dtype) for m in layer.matrices)
        self._views = [*self.gate.views, *self.up.views, *self.down.views]

    def targets(self, slot: int) -> list[np.ndarray]:
        """Writable views of one slot, one a component, in the order of the layer's matrices and components."""
        return [view[slot] for view in self._views]

    def copy_slot(self, slot: int, source: LayerBuffers, source_slot: int) -> None:
        """Copy an expert from another table of the same layer."""
        for target, origin in zip(self.targets(slot), source.targets(source_slot), strict=True):
            np.copyto(target, origin)
