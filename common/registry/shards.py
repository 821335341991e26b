"""All tensors of a model directory: the union of its shards' headers, with the index held against it.

The headers are the truth. mlx-lm loads `model*.safetensors` and never reads the index; other files (adapters,
`consolidated`) are not looked at. Knows names and files, not what a tensor means.
"""

from __future__ import annotations

import fnmatch
import os
import re
from dataclasses import dataclass
from pathlib import Path

from titan.common.errors import CheckpointContradiction, CheckpointMissing
from titan.common.registry.bounded_json import read_object
from titan.common.registry.headers import Identity, ShardHeader, TensorInfo, read_header

__all__ = ["Shard", "read_shards"]

MAX_SHARDS = 4096
INDEX_NAME = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})\.safetensors")
_MEND = "Download or copy the model again"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the checkpoint and what it was when its header was read."""

    path: Path
    nbytes: int
    identity: Identity


def read_shards(directory: Path) -> tuple[tuple[Shard, ...], dict[str, TensorInfo]]:
    """Headers of every shard in `directory` -> (shards by name, tensors by name).

    Raises:
        CheckpointMissing: no shard, or one of a numbered set, or one that the index names, is absent.
        CheckpointTruncated: a file is shorter than its header says.
        CheckpointContradiction: a tensor in two shards, or an index that disagrees with the headers.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(directory))
    except OSError as error:
        raise CheckpointMissing(f"{directory} cannot be listed ({error.strerror})", "Check the path") from error
    shard_names = [name for name in names if fnmatch.fnmatchcase(name, "model*.safetensors")]
    if not shard_names:
        others = [name for name in names if "safetensors" in name or name.endswith((".bin", ".gguf"))]
        seen = f"; it holds {', '.join(others[:4])}, which mlx-lm does not load" if others else ""
        raise CheckpointMissing(f"{directory} has no file named model*.safetensors{seen}", _MEND)
    if len(shard_names) > MAX_SHARDS:
        raise CheckpointContradiction(
            f"{directory} has {len(shard_names)} shards, more than {MAX_SHARDS}", "Give the model's own folder"
        )
    _check_numbering(directory, shard_names)
    headers = [read_header(directory / name) for name in shard_names]
    tensors = _union(headers)
    _check_index(directory, headers, tensors)
    return tuple(Shard(h.path, h.nbytes, h.identity) for h in headers), tensors


def _check_numbering(directory: Path, names: list[str]) -> None:
    sets: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            sets.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    for (stem, count), numbers in sets.items():
        for number in range(1, min(count, MAX_SHARDS) + 1):
            if number not in numbers:
                raise CheckpointMissing(
                    f"{directory} has {len(numbers)} of {count} shards: {stem}-{number:05d}-of-{count:05d}.safetensors "
                    "is missing",
                    _MEND,
                )


def _union(headers: list[ShardHeader]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointContradiction(
                    f"the tensor {name} is in {tensors[name].file} and in {header.path.name}",
                    "Remove the shards of the other version of the model",
                )
            tensors[name] = tensor
    return tensors


def _check_index(directory: Path, headers: list[ShardHeader], tensors: dict[str, TensorInfo]) -> None:
    path = directory / INDEX_NAME
    if not os.path.lexists(path):
        return
    mend = "Remove the index: the shards' headers suffice"
    weight_map = read_object(path, mend).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointContradiction(f"{path} has no weight_map", mend)
    present = {header.path.name for header in headers}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard not in present:
            raise CheckpointMissing(f"{path} puts {name[:200]!r} in {str(shard)[:200]!r}, which is not there", _MEND)
        if name not in tensors:
            raise CheckpointMissing(
                f"{path} puts {name[:200]!r} in {shard}, but no shard holds it",
                "Download the shard again, or remove the index if it is stale",
            )
        if tensors[name].file.name != shard:
            raise CheckpointContradiction(
                f"{path} puts {name} in {shard}, but it is in {tensors[name].file.name}", mend
            )
    if absent := tensors.keys() - weight_map.keys():
        name = min(absent)
        raise CheckpointContradiction(
            f"{path} does not name {name} of {tensors[name].file.name} ({len(absent)} such tensors)",
            mend,
        )
