"""The packed layout: all tensors of an expert side by side, so that one scatter read fetches it.

A pack is a model directory with a manifest. Experts lie in `experts-*.safetensors` under Hugging Face's names, each
expert aligned and without gaps inside, padding as U8 tensors named `titan.padding.*`. It may hold some experts only;
the manifest has the whole model's shape, the fingerprint of the checkpoint it was made from, and a CRC-32 an expert.
Reads headers; writing a pack is `titan.common.pack`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan.common.errors import CheckpointContradiction, CheckpointMissing, WireError
from titan.common.registry.bounded_json import read_object
from titan.common.registry.family import Family
from titan.common.registry.headers import TensorInfo, read_header
from titan.common.registry.layout import ComponentRange
from titan.common.registry.shape import LayerSpec, ModelShape
from titan.common.registry.shards import MAX_SHARDS, Shard

__all__ = [
    "ALIGNMENT_BYTES",
    "MANIFEST_NAME",
    "PACK_VERSION",
    "PADDING_PREFIX",
    "PackManifest",
    "PackedLayer",
    "check_seal",
    "expert_tensor_names",
    "place_packed",
    "read_manifest",
    "seal_of",
]

MANIFEST_NAME = "titan-pack.json"
PACK_VERSION = 2
ALIGNMENT_BYTES = 4096
PADDING_PREFIX = "titan.padding."
_SHARD = re.compile(r"experts-\d{5}-of-\d{5}\.safetensors")
_MEND = "Pack the checkpoint again with `titan pack`"


@dataclass(frozen=True, slots=True, eq=False)
class PackManifest:
    """What a pack says of itself.

    Args:
        shape: of the whole model, with the fingerprint of the checkpoint that was packed.
        checksums: layer -> expert -> CRC-32 of the expert's bytes, components in the shape's order.
        shards: names of the files with experts.
        source: the directory that was packed: a second copy, if it is still there.
        seal: over all of this, the config and the tensors outside the experts.
    """

    shape: ModelShape
    checksums: Mapping[int, Mapping[int, int]]
    shards: tuple[str, ...]
    source: str
    seal: str

    @property
    def experts(self) -> int:
        return sum(len(layer) for layer in self.checksums.values())

    def to_json(self) -> str:
        value = {
            "format": MANIFEST_NAME,
            "version": PACK_VERSION,
            "shape": json.loads(self.shape.to_json()),
            "experts": {str(la): {str(e): crc for e, crc in row.items()} for la, row in self.checksums.items()},
            "shards": list(self.shards),
            "source": self.source,
            "seal": self.seal,
        }
        return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A MoE layer of a pack: its shape, and where those experts lie that the pack holds."""

    spec: LayerSpec
    placed: Mapping[int, tuple[ComponentRange, ...]]
    tensor_names: tuple[str, ...]
    stacked: bool = False

    def ranges(self, expert: int) -> tuple[ComponentRange, ...]:
        """Raises KeyError when the pack does not hold the expert."""
        return self.placed[expert]

    def names(self) -> Iterator[str]:
        return iter(self.tensor_names)


def seal_of(manifest: PackManifest, non_experts: str) -> str:
    """The seal in hex. `non_experts`: fingerprint of the config and the tensors outside the experts."""
    digest = hashlib.sha256(b"titan pack 1\n")
    digest.update(manifest.shape.to_json().encode())
    rows = {str(la): {str(e): crc for e, crc in row.items()} for la, row in manifest.checksums.items()}
    digest.update(json.dumps([rows, list(manifest.shards), non_experts], sort_keys=True).encode())
    return digest.hexdigest()


def expert_tensor_names(family: Family, spec: LayerSpec, expert: int) -> Iterator[str]:
    """Names of an expert's tensors, in the order of the layer's matrices and components."""
    path = family.per_expert.format(layer=spec.index, expert=expert)
    for matrix in spec.matrices:
        for component in matrix.components:
            yield f"{path}.{family.projections[matrix.name]}.{component.name}"


def read_manifest(directory: Path) -> PackManifest | None:
    """The manifest of the pack in `directory`; None when it is an ordinary checkpoint.

    Raises:
        CheckpointTruncated: not readable as JSON.
        CheckpointContradiction: another version, or values that are not a manifest's.
    """
    path = directory / MANIFEST_NAME
    if not path.exists():
        return None
    raw = read_object(path, _MEND)
    if raw.get("version") != PACK_VERSION:
        raise CheckpointContradiction(
            f"{path} has version {str(raw.get('version'))[:40]!r}, this Titan reads {PACK_VERSION}", _MEND
        )
    try:
        shape = ModelShape.from_json(json.dumps(raw["shape"]))
        checksums = _checksums(shape, raw["experts"])
        shards, source, seal = raw["shards"], raw["source"], raw["seal"]
        if not isinstance(shards, list) or not 1 <= len(shards) <= MAX_SHARDS:
            raise ValueError("the list of shards")
        if not all(isinstance(name, str) and _SHARD.fullmatch(name) for name in shards):
            raise ValueError("the name of a shard")
        if not isinstance(source, str) or not isinstance(seal, str):
            raise ValueError("source or seal")
    except (KeyError, TypeError, AttributeError, ValueError, WireError) as error:
        raise CheckpointContradiction(f"{path} is not a manifest ({type(error).__name__}: {error})", _MEND) from error
    return PackManifest(shape, checksums, tuple(shards), source, seal)


def _checksums(shape: ModelShape, raw: object) -> dict[int, dict[int, int]]:
    if not isinstance(raw, dict):
        raise ValueError("experts")
    layers = {spec.index for spec in shape.layers}
    checksums: dict[int, dict[int, int]] = {}
    for layer, row in raw.items():
        if int(layer) not in layers:
            raise ValueError(f"layer {layer}")
        checksums[int(layer)] = {int(expert): crc for expert, crc in row.items()}
        for expert, crc in checksums[int(layer)].items():
            if not 0 <= expert < shape.num_experts or type(crc) is not int or not 0 <= crc < 1 << 32:
                raise ValueError(f"expert {expert} of layer {layer}")
    return checksums


def place_packed(
    directory: Path, manifest: PackManifest, family: Family
) -> tuple[dict[int, PackedLayer], tuple[Shard, ...]]:
    """Find every expert that the manifest names -> (layers by index, shards).

    Raises:
        CheckpointMissing: a shard or a tensor is absent.
        CheckpointTruncated: a shard ends early.
        CheckpointContradiction: a tensor of another dtype or shape, or experts that do not lie side by side.
    """
    headers = [read_header(directory / name) for name in manifest.shards]
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors and not name.startswith(PADDING_PREFIX):
                raise CheckpointContradiction(f"{header.path} repeats {name} of {tensors[name].file}", _MEND)
            tensors[name] = tensor
    layers = {}
    for spec in manifest.shape.layers:
        placed: dict[int, tuple[ComponentRange, ...]] = {}
        names: list[str] = []
        for expert in manifest.checksums.get(spec.index, {}):
            wanted = tuple(expert_tensor_names(family, spec, expert))
            placed[expert] = tuple(_ranges(spec, wanted, tensors, directory))
            names.extend(wanted)
        layers[spec.index] = PackedLayer(spec, placed, tuple(names))
    return layers, tuple(Shard(h.path, h.nbytes, h.identity) for h in headers)


def _ranges(
    spec: LayerSpec, names: tuple[str, ...], tensors: Mapping[str, TensorInfo], directory: Path
) -> Iterator[ComponentRange]:
    components = [(matrix.name, c) for matrix in spec.matrices for c in matrix.components]
    due: tuple[Path, int] | None = None
    for name, (matrix, component) in zip(names, components, strict=True):
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointMissing(f"{directory} should hold {name}, but no shard does", _MEND)
        if (tensor.dtype, tensor.shape) != (component.dtype, component.shape):
            raise CheckpointContradiction(
                f"{name} in {tensor.file} is {tensor.dtype} {list(tensor.shape)}, the manifest says "
                f"{component.dtype} {list(component.shape)}",
                _MEND,
            )
        here = (tensor.file, tensor.offset)
        if here != due and (due is not None or tensor.offset % ALIGNMENT_BYTES):
            raise CheckpointContradiction(f"{name} in {tensor.file} does not lie where an expert's tensors must", _MEND)
        due = (tensor.file, tensor.offset + tensor.nbytes)
        yield ComponentRange(matrix, component.name, tensor.file, tensor.offset, tensor.nbytes)


def check_seal(path: Path, manifest: PackManifest, non_experts: str) -> None:
    """Raises CheckpointContradiction when config, manifest or the other tensors are not those that were packed."""
    if seal_of(manifest, non_experts) != manifest.seal:
        raise CheckpointContradiction(
            f"{path}: the manifest, config.json and the tensors outside the experts do not belong together", _MEND
        )
