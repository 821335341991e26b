"""Reuse from row to row as serving saw it, kept between starts, so that the next start plans with it.

In a file of its own, bound to the checkpoint's fingerprint. Knows shares, not what is done with them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from titan.common.prediction.state import load_state, save_state
from titan.placement.reuse import LAGS, Reuse


def remember_reuse(path: Path, fingerprint: str, reuse: Reuse) -> None:
    """Raises StoreError: the file cannot be written."""
    save_state(path, fingerprint, {"fresh": np.array(reuse, np.float64)})


def recall_reuse(path: Path, fingerprint: str, layers: int) -> Reuse | None:
    """Of an earlier run; None when there is no such file of this model."""
    found = load_state(path, fingerprint, {"fresh": (layers, len(LAGS))})
    if found is None:
        return None
    fresh = np.minimum.accumulate(np.clip(found["fresh"].astype(np.float64), 0.0, 1.0), axis=1)
    return tuple(tuple(row) for row in fresh.tolist())
