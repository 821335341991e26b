"""How often serving looked experts up here, kept between starts, so that the next start knows whom to read first.

In a file of its own, bound to the checkpoint's fingerprint. Knows counts, not what is done with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titan.common.experts import ExpertLayer
from titan.common.prediction.state import load_state, save_state

__all__ = ["recall_uses", "remember_uses"]

MAX_USES = 10_000  # of a layer's most used expert: older text weighs no more than this


def remember_uses(path: Path, fingerprint: str, num_experts: int, layers: Sequence[ExpertLayer]) -> bool:
    """Write the counts of `layers`, which are all MoE layers in order; False when there are none.

    Raises:
        StoreError: the file cannot be written.
    """
    uses = np.array([[layer.table.uses[e] for e in range(num_experts)] for layer in layers], np.float64)
    if not uses.any():
        return False
    save_state(path, fingerprint, {"uses": uses})
    return True


def recall_uses(path: Path, fingerprint: str, num_experts: int, layers: Sequence[ExpertLayer]) -> bool:
    """Begin with the counts of an earlier run; False when there is no such file of this model."""
    found = load_state(path, fingerprint, {"uses": (len(layers), num_experts)})
    if found is None:
        return False
    for layer, uses in zip(layers, found["uses"], strict=True):
        scaled = np.maximum(uses, 0) * min(1.0, MAX_USES / max(1.0, float(uses.max())))
        layer.table.uses = Counter({e: int(n) for e, n in enumerate(scaled.tolist()) if n >= 1})
    return True
