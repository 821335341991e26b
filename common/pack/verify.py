"""Read a whole pack and hold every expert against its checksum. Writes nothing."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from titan.common.errors import CheckpointContradiction, ChecksumMismatch
from titan.common.registry import Checkpoint
from titan.common.store import ExpertStore

__all__ = ["verify_pack"]


def verify_pack(checkpoint: Checkpoint, on_progress: Callable[[int, int], None] = lambda _done, _total: None) -> int:
    """Experts checked.

    Args:
        on_progress: told bytes done and bytes in all.

    Raises:
        CheckpointContradiction: not a pack.
        ChecksumMismatch: names the first expert that differs and how many do.
        StoreError, CheckpointChanged: the file cannot be read, or is another one now.
    """
    if checkpoint.pack is None:
        raise CheckpointContradiction(f"{checkpoint.path} is not a pack", "Give a directory that `titan pack` wrote")
    sizes = {spec.index: spec.expert_bytes for spec in checkpoint.shape.layers}
    total = sum(len(row) * sizes[layer] for layer, row in checkpoint.pack.checksums.items())
    done = experts = 0
    wrong: list[tuple[int, int]] = []
    store = ExpertStore(checkpoint, verify="never")
    try:
        for layer, row in checkpoint.pack.checksums.items():
            for expert, crc in row.items():
                if zlib.crc32(store.read_bytes(layer, expert)) != crc:
                    wrong.append((layer, expert))
                experts += 1
                done += sizes[layer]
                on_progress(done, total)
    finally:
        store.close()
    if wrong:
        layer, expert = wrong[0]
        raise ChecksumMismatch(
            f"{len(wrong)} of {experts} experts in {checkpoint.path} are not what was packed; the first is expert "
            f"{expert} of layer {layer} in {checkpoint.ranges(layer, expert)[0].file.name}",
            "Check the disk and pack the checkpoint again",
        )
    return experts
