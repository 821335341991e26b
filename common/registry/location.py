"""Turn what a user calls a model into a directory on this machine: a path, or a name in the Hugging Face cache.

Never uses the network. Knows nothing of what a model directory holds.
"""

from __future__ import annotations

from pathlib import Path

from titan.common.errors import CheckpointMissing
from titan.common.hub.names import is_repository

__all__ = ["locate"]


def locate(path: Path) -> Path:
    """The model directory for `path`; `org/name` is also looked up in the local Hugging Face cache.

    Raises:
        CheckpointMissing: there is none.
    """
    try:
        if path.is_dir():
            return path.absolute()  # symlinks stay: the name is what users and messages know
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise CheckpointMissing(
            f"{str(path)[:300]!r} cannot be a model directory ({error})", "Check the path"
        ) from error
    if exists:
        raise CheckpointMissing(f"{path} is a file, not a model directory", "Give the folder that holds config.json")
    name = path.as_posix()
    if not is_repository(name):
        raise CheckpointMissing(f"there is no model directory {path}", "Check the path")
    # Imported here: only this branch needs it.
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    raise CheckpointMissing(
        f"{name} is neither a directory here nor in the local Hugging Face cache",
        f"Get it with `titan download {name}`, or give a path",
    )
