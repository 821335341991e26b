"""Expert registry: what a checkpoint holds and where, from its config and headers alone."""

from titan.common.registry.checkpoint import Checkpoint, Routing, open_checkpoint
from titan.common.registry.layout import ComponentRange
from titan.common.registry.shape import ComponentSpec, LayerSpec, MatrixSpec, ModelShape

__all__ = [
    "Checkpoint",
    "ComponentRange",
    "ComponentSpec",
    "LayerSpec",
    "MatrixSpec",
    "ModelShape",
    "Routing",
    "open_checkpoint",
]
