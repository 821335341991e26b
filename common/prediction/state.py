"""What was learned about a model's routing, on disk: written whole, bound to the checkpoint's fingerprint.

A file of another model or another shape is not used. Knows arrays by name, not what they mean.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from titan.common.errors import StoreError
from titan.common.whole_file import whole_file

__all__ = ["load_state", "save_state"]

MAX_STATE_BYTES = 1 << 30


def save_state(path: Path, fingerprint: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write `arrays` to `path`, atomically.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            np.savez_compressed(file, fingerprint=np.array(fingerprint), **dict(arrays))  # type: ignore[arg-type]
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror})", "Check the disk and its permissions"
        ) from error


def load_state(path: Path, fingerprint: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray] | None:
    """The arrays named in `shapes`; None when there is no file, or it is of another model or damaged."""
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            return None
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:
            if str(data["fingerprint"]) != fingerprint:
                return None
            arrays = {name: data[name] for name in shapes}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    if any(arrays[name].shape != shape or arrays[name].dtype.kind not in "fiu" for name, shape in shapes.items()):
        return None
    if not all(np.isfinite(array).all() for array in arrays.values()):
        return None
    return arrays
