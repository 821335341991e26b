"""All tensors of a model directory: the union of its shards' headers, with the index held against it.

The headers are the truth. mlx-lm loads `model*.safetensors` and never reads the index; other files (adapters,
`consolidated`) are not looked at. Knows names and files, not what a tensor means.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from titan.common.errors import CheckpointContradiction, CheckpointMissing, CheckpointTruncated
from titan.common.registry.headers import Identity, ShardHeader, TensorInfo, read_header

__all__ = ["Shard", "read_json_object", "read_shards"]

MAX_JSON_BYTES = 64 << 20
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
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointContradiction(f"{path} has no weight_map", "Remove the index: the shards' headers suffice")
    present = {header.path.name for header in headers}
    for name, shard in weight_map.items():
        if shard not in present:
            raise CheckpointMissing(f"{path} puts {name[:200]} in {str(shard)[:200]!r}, which is not there", _MEND)
        if name not in tensors:
            raise CheckpointMissing(
                f"{path} puts {name[:200]} in {shard}, but no shard holds it",
                "Download the shard again, or remove the index if it is stale",
            )
        if tensors[name].file.name != shard:
            raise CheckpointContradiction(
                f"{path} puts {name} in {shard}, but it is in {tensors[name].file.name}", "Remove the stale index"
            )
    if absent := tensors.keys() - weight_map.keys():
        name = min(absent)
        raise CheckpointContradiction(
            f"{path} does not name {name} of {tensors[name].file.name} ({len(absent)} such tensors)",
            "Remove the index: it is incomplete, and the shards' headers suffice",
        )


def read_json_object(path: Path) -> dict[str, object]:
    """Read a bounded JSON object.

    Raises:
        CheckpointMissing: absent or not readable.
        CheckpointTruncated: too large, not JSON or not an object.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointMissing(f"{path} cannot be read ({error.strerror})", _MEND) from error
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointTruncated(f"{path} has more than {MAX_JSON_BYTES} bytes", "Give the model's own folder")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointTruncated(f"{path} is not valid JSON ({error or type(error).__name__})"[:300], _MEND) from error
    if not isinstance(value, dict):
        raise CheckpointTruncated(f"{path} is not a JSON object", _MEND)
    return value
