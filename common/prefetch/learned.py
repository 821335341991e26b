"""What serving has learned about a model's routing, kept between starts: weights of the forecast policy and
transition counts, in one file bound to the checkpoint's fingerprint. Decides nothing from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titan.common.experts import ExpertLayer
from titan.common.prediction import Transition
from titan.common.prediction.state import load_state, save_state
from titan.common.prefetch.prefetcher import Prefetcher
from titan.common.slots import Forecast

__all__ = ["recall", "remember"]

MAX_STEPS = 100_000  # older experience weighs no more than this, so that new text still counts


def remember(path: Path, fingerprint: str, layers: Sequence[ExpertLayer], prefetcher: Prefetcher | None) -> bool:
    """Write what was learned; False when there is nothing to write.

    Raises:
        StoreError: the file cannot be written.
    """
    arrays = _arrays(layers, prefetcher)
    if arrays:
        save_state(path, fingerprint, arrays)
    return bool(arrays)


def recall(path: Path, fingerprint: str, layers: Sequence[ExpertLayer], prefetcher: Prefetcher | None) -> bool:
    """Take up what an earlier run learned; False when there is no such file of this model."""
    own = _arrays(layers, prefetcher)
    found = load_state(path, fingerprint, {name: array.shape for name, array in own.items()}) if own else None
    if found is None:
        return False
    scale = min(1.0, MAX_STEPS / max(1.0, *(float(found[n].max(initial=0)) for n in found if n.endswith("steps"))))
    for name, array in own.items():
        np.copyto(array, found[name] * (1.0 if name.endswith("weights") else scale), casting="unsafe")
    return True


def _arrays(layers: Sequence[ExpertLayer], prefetcher: Prefetcher | None) -> dict[str, np.ndarray]:
    """Views of what is live, by name. Weights are taken up as they are, counts and squares at most at MAX_STEPS."""
    arrays: dict[str, np.ndarray] = {}
    for layer in layers:
        policy = layer.table.policy
        if isinstance(policy, Forecast) and not layer.whole:
            name = f"forecast.{layer.buffers.layer.index}"
            arrays[f"{name}.weights"] = policy.foresight.weights
            arrays[f"{name}.squares"] = policy.foresight.squares
            arrays[f"{name}.steps"] = policy.foresight.steps
    for predictor in prefetcher.predictors if prefetcher is not None else ():
        if isinstance(predictor, Transition):
            name = f"transition.{predictor.depth}"
            arrays[f"{name}.counts"] = predictor.counts
            arrays[f"{name}.uses"] = predictor.uses
            arrays[f"{name}.steps"] = predictor.steps
    return arrays
