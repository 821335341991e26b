"""Where every expert goes in the shards of a pack: headers, offsets and sizes, before a byte is written.

Pure functions over a model's shape; the layout itself is described in `titan.common.registry.packed`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan.common.registry.families import FAMILIES
from titan.common.registry.packed import ALIGNMENT_BYTES, PADDING_PREFIX, expert_tensor_names
from titan.common.registry.shape import ModelShape

__all__ = ["DEFAULT_SHARD_BYTES", "ShardLayout", "plan_shards"]

DEFAULT_SHARD_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One file of a pack.

    Args:
        header: the file's first bytes, length field included; a multiple of the alignment.
        places: (layer, expert, offset in the file), ascending; each is followed by padding up to the alignment.
        nbytes: size of the whole file.
    """

    name: str
    header: bytes
    places: tuple[tuple[int, int, int], ...]
    nbytes: int


def plan_shards(
    shape: ModelShape, experts: Mapping[int, Sequence[int]], shard_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[ShardLayout, ...]:
    """Lay out `experts` (layer -> expert numbers) in shards of about `shard_bytes`, at least one expert each."""
    groups: list[list[tuple[int, int]]] = [[]]
    filled = 0
    for spec in shape.layers:
        padded = _aligned(spec.expert_bytes)
        for expert in sorted(set(experts.get(spec.index, ()))):
            if groups[-1] and filled + padded > shard_bytes:
                groups.append([])
                filled = 0
            groups[-1].append((spec.index, expert))
            filled += padded
    return tuple(
        _shard(shape, f"experts-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    )


def _shard(shape: ModelShape, name: str, group: list[tuple[int, int]]) -> ShardLayout:
    family = FAMILIES[shape.family]
    specs = {spec.index: spec for spec in shape.layers}
    entries: dict[str, object] = {"__metadata__": {"format": "mlx", "titan_pack": "1"}}
    starts: list[int] = []
    end = 0
    for layer, expert in group:
        spec = specs[layer]
        starts.append(end)
        components = [c for matrix in spec.matrices for c in matrix.components]
        for tensor, component in zip(expert_tensor_names(family, spec, expert), components, strict=True):
            entries[tensor] = {
                "dtype": component.dtype,
                "shape": list(component.shape),
                "data_offsets": [end, end + component.nbytes],
            }
            end += component.nbytes
        padding = _aligned(end) - end
        if padding:
            entries[f"{PADDING_PREFIX}{len(starts)}"] = {
                "dtype": "U8",
                "shape": [padding],
                "data_offsets": [end, end + padding],
            }
            end += padding
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (_aligned(8 + len(text)) - 8 - len(text))
    header = len(text).to_bytes(8, "little") + text
    places = tuple((layer, expert, len(header) + start) for (layer, expert), start in zip(group, starts, strict=True))
    return ShardLayout(name, header, places, len(header) + end)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
