"""The shape of a model's experts: values only, no files, no tensors.

A coordinator builds it from a checkpoint; a worker without one receives it as JSON. Two nodes that hold equal
shapes and the same fingerprint compute the same thing. Knows neither files nor MLX.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from titan.common.errors import WireError

MATRICES = ("gate", "up", "down")
COMPONENTS = ("weight", "scales", "biases", "bias")
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1}
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
ACTIVATIONS = ("silu", "gpt_oss")
MAX_SHAPE_JSON_BYTES = 4 << 20
MAX_LAYERS, MAX_EXPERTS, MAX_WIDTH = 1024, 4096, 1 << 18


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """One tensor of one expert's matrix.

    Args:
        name: "weight", "scales", "biases" (affine zero points) or "bias" (a linear layer's own).
        dtype: safetensors' name of the dtype on disk: "U32", "BF16", "F16", "F32", "U8".
        shape: shape of one expert's part, e.g. (out, in * bits / 32).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """One projection of an expert: y = x W^T with W of [out_features, in_features].

    `bits`, `group_size` and `mode` are None when the matrix is not quantized.
    """

    name: str
    in_features: int
    out_features: int
    components: tuple[ComponentSpec, ...]
    bits: int | None = None
    group_size: int | None = None
    mode: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.components)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The experts of one MoE layer.

    Args:
        index: the model's own layer number (dense layers are counted too).
        module_path: path of the module that holds the experts in mlx-lm's tree,
            e.g. "model.layers.3.mlp.switch_mlp".
        matrices: gate, up and down, in that order.
        activation: what stands between them, one of ACTIVATIONS.
    """

    index: int
    module_path: str
    matrices: tuple[MatrixSpec, MatrixSpec, MatrixSpec]
    activation: str = "silu"

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert on disk (b of the formulation)."""
        return sum(m.nbytes for m in self.matrices)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What two nodes must agree on before one executes experts for the other.

    Args:
        fingerprint: content hash of the checkpoint (hex, 64 characters).
        family: `model_type` of the config.
        hidden_size: width of an expert's input and output (D).
        num_experts: experts a MoE layer (E).
        top_k: experts a row (K).
        num_layers: all layers of the model, dense ones included.
        layers: the MoE layers, by index.
    """

    fingerprint: str
    family: str
    hidden_size: int
    num_experts: int
    top_k: int
    num_layers: int
    layers: tuple[LayerSpec, ...]

    def layer(self, index: int) -> LayerSpec:
        """The MoE layer with the model's layer number `index`; KeyError when it is dense or absent."""
        for spec in self.layers:
            if spec.index == index:
                return spec
        raise KeyError(index)

    @property
    def expert_bytes_total(self) -> int:
        return sum(layer.expert_bytes for layer in self.layers) * self.num_experts

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> ModelShape:
        """Parse and check a shape that came over the wire.

        Raises:
            WireError: not JSON, a field missing or of another type, a name or number out of bounds.
        """
        if len(text) > MAX_SHAPE_JSON_BYTES:
            raise WireError(f"the model shape has {len(text)} bytes, more than {MAX_SHAPE_JSON_BYTES}")
        try:
            raw = json.loads(text)
            shape = ModelShape(
                fingerprint=raw["fingerprint"],
                family=raw["family"],
                hidden_size=raw["hidden_size"],
                num_experts=raw["num_experts"],
                top_k=raw["top_k"],
                num_layers=raw["num_layers"],
                layers=tuple(_layer(r) for r in raw["layers"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WireError(f"the model shape cannot be read ({type(error).__name__}: {error})") from error
        _check(shape)
        return shape


def _layer(raw: dict) -> LayerSpec:
    gate, up, down = (
        MatrixSpec(
            name=m["name"],
            in_features=m["in_features"],
            out_features=m["out_features"],
            components=tuple(ComponentSpec(c["name"], c["dtype"], tuple(c["shape"])) for c in m["components"]),
            bits=m["bits"],
            group_size=m["group_size"],
            mode=m["mode"],
        )
        for m in raw["matrices"]
    )
    return LayerSpec(raw["index"], raw["module_path"], (gate, up, down), raw["activation"])


def _check(shape: ModelShape) -> None:
    def need(condition: bool, what: str) -> None:
        if not condition:
            raise WireError(f"the model shape is not valid: {what}")

    def whole(value: object, low: int, high: int, what: str) -> None:
        need(type(value) is int and low <= value <= high, f"{what} is {value!r}, not a number in {low}..{high}")

    need(isinstance(shape.fingerprint, str) and len(shape.fingerprint) == 64, "fingerprint is not 64 characters")
    need(isinstance(shape.family, str) and len(shape.family) <= 64, "family is not a short string")
    whole(shape.hidden_size, 1, MAX_WIDTH, "hidden_size")
    whole(shape.num_experts, 1, MAX_EXPERTS, "num_experts")
    whole(shape.top_k, 1, shape.num_experts, "top_k")
    whole(shape.num_layers, 1, MAX_LAYERS, "num_layers")
    need(0 < len(shape.layers) <= shape.num_layers, "the number of MoE layers")
    previous = -1
    for layer in shape.layers:
        whole(layer.index, previous + 1, shape.num_layers - 1, "layer index")
        previous = layer.index
        need(isinstance(layer.module_path, str) and len(layer.module_path) <= 256, "module_path")
        need(layer.activation in ACTIVATIONS, f"activation {layer.activation!r}")
        need(tuple(m.name for m in layer.matrices) == MATRICES, f"matrices of layer {layer.index}")
        for matrix in layer.matrices:
            whole(matrix.in_features, 1, MAX_WIDTH, "in_features")
            whole(matrix.out_features, 1, MAX_WIDTH, "out_features")
            if matrix.mode is not None:
                need(isinstance(matrix.mode, str) and matrix.mode in MODES, f"mode {matrix.mode!r}")
                whole(matrix.bits, 1, 8, "bits")
                whole(matrix.group_size, 16, 128, "group_size")
            names = [c.name for c in matrix.components]
            need(all(isinstance(name, str) for name in names), "a component has no name")
            need(len(set(names)) == len(names) and "weight" in names, f"components {names}")
            for component in matrix.components:
                need(component.name in COMPONENTS, f"component {component.name!r}")
                need(isinstance(component.dtype, str) and component.dtype in DTYPE_BYTES, f"dtype {component.dtype!r}")
                need(1 <= len(component.shape) <= 2, f"rank of {component.name}")
                for extent in component.shape:
                    whole(extent, 1, MAX_WIDTH, f"extent of {component.name}")
        gate, up, down = layer.matrices
        need(
            gate.in_features == up.in_features == down.out_features == shape.hidden_size
            and gate.out_features == up.out_features == down.in_features,
            f"widths of layer {layer.index} do not chain",
        )
