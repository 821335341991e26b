"""What Hello must agree on before a session opens: protocol, software, checkpoint and dtype. Pure checks over values.

A mismatch is a WorkerRefused that names both sides.
"""

from __future__ import annotations

from titan.common.arrays import COMPUTE_DTYPES, compute_dtype
from titan.common.errors import WireError, WorkerRefused
from titan.common.registry.shape import ModelShape
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.common.wire.messages import PROTOCOL_VERSION
from titan.proto.titan.v1 import worker_pb2 as pb


def check_versions(worker: str, coordinator: str, request: pb.HelloRequest) -> None:
    """Whether both sides speak the same protocol and compute with the same kernels."""
    if request.protocol_version != PROTOCOL_VERSION:
        raise WorkerRefused(
            f"worker {worker} speaks protocol {PROTOCOL_VERSION} (Titan {SOFTWARE_VERSION}), coordinator "
            f"{coordinator} speaks {request.protocol_version} (Titan {request.software_version[:32]})",
            "install the same version of titan-moe on both",
        )
    if request.mlx_version != MLX_VERSION:
        raise WorkerRefused(
            f"worker {worker} runs mlx {MLX_VERSION}, coordinator {coordinator} runs mlx "
            f"{request.mlx_version[:32]}: their kernels may differ in the last bits",
            "install the same version of mlx on both",
        )
    if not 8 <= len(request.instance_id) <= 64:
        raise WireError("instance_id is not 8 to 64 characters")


def agree_on_model(
    worker: str, coordinator: str, request: pb.HelloRequest, own: ModelShape | None
) -> tuple[ModelShape, str]:
    """The model's shape and the dtype of activations.

    Args:
        own: shape of the worker's own copy of a checkpoint, if it has one.
    """
    shape = ModelShape.from_json(request.model_shape)
    if own is not None and own.fingerprint != shape.fingerprint:
        raise WorkerRefused(
            f"worker {worker} has a {own.family} checkpoint {own.fingerprint[:12]}, coordinator "
            f"{coordinator} serves a {shape.family} checkpoint {shape.fingerprint[:12]}",
            "start titan-worker with the same model, or without --model so that it receives its experts",
        )
    floats = {c.dtype for layer in shape.layers for m in layer.matrices for c in m.components if c.dtype[0] != "U"}
    own_dtype = compute_dtype(floats)
    if request.compute_dtype not in COMPUTE_DTYPES or request.compute_dtype != own_dtype:
        raise WorkerRefused(
            f"worker {worker} computes in {own_dtype}, coordinator {coordinator} in {request.compute_dtype[:16]}",
            "use machines with the same kind of device",
        )
    return shape, own_dtype
