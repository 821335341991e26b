"""Packed experts: rewrite a checkpoint so that all tensors of an expert lie side by side, and check such a copy."""

from titan.common.pack.layout import DEFAULT_SHARD_BYTES
from titan.common.pack.verify import verify_pack
from titan.common.pack.writer import write_pack

__all__ = ["DEFAULT_SHARD_BYTES", "verify_pack", "write_pack"]
