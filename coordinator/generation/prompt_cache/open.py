"""Makes the prompt cache of a model: what its entries depend on besides tokens, and where they are kept."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from titan.common.log import get_logger
from titan.coordinator.generation.prompt_cache.blocks import setting_name
from titan.coordinator.generation.prompt_cache.cache import PromptCache
from titan.coordinator.generation.prompt_cache.disk import DiskBlocks

__all__ = ["open_prompt_cache"]

_FORMAT = "1"

log = get_logger("coordinator.prompt_cache")


def open_prompt_cache(
    fingerprint: str, dtype: str, memory_bytes: int, folder: Path | None, disk_bytes: int
) -> PromptCache | None:
    """On the engine's thread. None when `memory_bytes` is 0. A folder that cannot be used is said and left out.

    Args:
        fingerprint: the checkpoint's.
        dtype: the compute dtype.
        folder: for entries on disk; None keeps them in memory alone.
    """
    if not memory_bytes:
        return None
    device = str(mx.default_device().type)
    setting = setting_name(_FORMAT, fingerprint, dtype, version("mlx"), version("mlx-lm"), device)
    disk = None
    if folder is not None and disk_bytes:
        try:
            disk = DiskBlocks(folder, disk_bytes)
        except OSError as error:
            log.warning("prompts are not kept on disk", folder=str(folder), error=str(error))
    return PromptCache(setting, memory_bytes, disk)
