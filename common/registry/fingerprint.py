"""The fingerprint of a checkpoint: equal for copies of one model, different for different weights.

sha256 over three parts, each independent of file names, shard split and offsets:

1. the config keys that change what is computed (`Family.computation_keys`, absent ones filled in, nulls left out,
   whole numbers written alike);
2. the tensor table: name, dtype and shape, by name. Bits, group and mode follow from it;
3. sampled content: from each of at most 2,048 tensors (all if there are fewer, else those whose hashed name is
   smallest) windows of 4 KiB, evenly spread, the first at the tensor's start and the last at its end; 8 windows
   a tensor when there are few tensors, at least one when there are many, 2,048 + 2,048 in all at most. A tensor
   shorter than its windows is read whole.

So at most 16 MiB are read. A change that touches no window goes unseen: the fingerprint tells models apart, it is
no checksum. Knows the table of tensors and the files, nothing of experts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from titan.common.errors import CheckpointChanged, CheckpointTruncated
from titan.common.registry.headers import Identity, TensorInfo, identity_of

__all__ = ["MAX_SAMPLED_TENSORS", "WINDOW_BYTES", "fingerprint"]

WINDOW_BYTES = 4096
MAX_SAMPLED_TENSORS = 2048
MAX_WINDOWS = 8


def fingerprint(
    config: Mapping[str, object],
    computation_keys: Iterable[str],
    tensors: Mapping[str, TensorInfo],
    identities: Mapping[Path, Identity],
) -> str:
    """The fingerprint in hex, 64 characters. `identities`: what each file was when its header was read.

    Raises:
        CheckpointChanged: a file was replaced since.
        CheckpointTruncated: a file cannot be read.
    """
    digest = hashlib.sha256(b"titan fingerprint 1\n")
    kept = {key: _canonical(config[key]) for key in computation_keys if config.get(key) is not None}
    digest.update(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
    samples = _samples(_chosen(tensors), identities)
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()


def _canonical(value: object) -> object:
    """1e4, 10000.0 and 10000 are one number; nulls in objects count as absent."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items() if item is not None}
    return [_canonical(item) for item in value] if isinstance(value, list) else value


def _chosen(tensors: Mapping[str, TensorInfo]) -> list[TensorInfo]:
    if len(tensors) <= MAX_SAMPLED_TENSORS:
        return list(tensors.values())
    names = sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [tensors[name] for name in names[:MAX_SAMPLED_TENSORS]]


def _samples(tensors: list[TensorInfo], identities: Mapping[Path, Identity]) -> dict[str, bytes]:
    windows = min(MAX_WINDOWS, max(1, 2 * MAX_SAMPLED_TENSORS // max(1, len(tensors))))
    samples: dict[str, bytes] = {}
    for path in {tensor.file for tensor in tensors}:
        here = sorted((t for t in tensors if t.file == path), key=lambda t: t.offset)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if identity_of(os.fstat(descriptor)) != identities[path]:
                    raise CheckpointChanged(
                        f"{path} was replaced while it was opened", "Try again when nothing writes there"
                    )
                for tensor in here:
                    samples[tensor.name] = _sample(descriptor, tensor, windows)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointTruncated(
                f"{path} cannot be read ({error.strerror})", "Check the disk, then copy the file again"
            ) from error
    return samples


def _sample(descriptor: int, tensor: TensorInfo, windows: int) -> bytes:
    digest = hashlib.sha256()
    if tensor.nbytes <= windows * WINDOW_BYTES:
        digest.update(os.pread(descriptor, tensor.nbytes, tensor.offset))
        return digest.digest()
    last = tensor.nbytes - WINDOW_BYTES
    for window in range(windows):
        start = last * window // max(1, windows - 1)
        digest.update(os.pread(descriptor, WINDOW_BYTES, tensor.offset + start))
    return digest.digest()
