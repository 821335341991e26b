"""A trace of the router's choices S_{t,l} as a value, and what it says about a model's routing.

Arrays only: `trace_file` stores it, `synthetic` makes one up, `simulate` replays it. It knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.common.errors import PlanError
from titan.placement.values import MAX_EXPERTS, MAX_LAYERS, MAX_TOP_K

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace is of: the checkpoint's fingerprint, its MoE layers by number, E and K."""

    fingerprint: str
    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def check(self) -> None:
        """Raises PlanError: a number out of bounds."""
        good = (
            isinstance(self.fingerprint, str)
            and 0 < len(self.fingerprint) <= 256
            and 0 < len(self.layers) <= MAX_LAYERS
            and all(type(i) is int and 0 <= i < 1 << 20 for i in self.layers)
            and type(self.num_experts) is int
            and 1 <= self.num_experts <= MAX_EXPERTS
            and type(self.top_k) is int
            and 1 <= self.top_k <= min(self.num_experts, MAX_TOP_K)
        )
        if not good:
            raise PlanError(
                f"the trace's header has impossible numbers ({len(self.layers)} layers, {self.num_experts} experts, "
                f"top-{self.top_k})",
                "record the trace again",
            )


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """Routing of rows in the order they were decoded.

    Args:
        ids: [rows, moe layers, K] expert ids, uint16.
        step: [rows] number of the step a row belongs to, ascending; rows of one step ran together.
        probabilities: [rows, moe layers, K] router probabilities of the chosen, or None.
    """

    header: TraceHeader
    ids: NDArray[np.uint16]
    step: NDArray[np.int64]
    probabilities: NDArray[np.float32] | None = None

    def check(self) -> None:
        """Raises PlanError: shapes that disagree, or ids the model does not have, naming row and layer."""
        self.header.check()
        wanted = (len(self.step), len(self.header.layers), self.header.top_k)
        if self.ids.shape != wanted or (self.probabilities is not None and self.probabilities.shape != wanted):
            raise PlanError(f"the trace's arrays have shape {self.ids.shape}, not {wanted}", "record it again")
        check_ids(self.header, self.ids)

    def frequencies(self) -> Floats:
        """[moe layers, E]: share of rows that select the expert; a layer sums to K."""
        rows, layers, _ = self.ids.shape
        out = np.stack([np.bincount(self.ids[:, i].ravel(), minlength=self.header.num_experts) for i in range(layers)])
        return out / max(1, rows)

    def reuse(self) -> Floats:
        """[moe layers]: mean |S_t & S_{t-1}| / K between consecutive rows."""
        if len(self.ids) < 2:
            return np.zeros(self.ids.shape[1])
        same = (self.ids[1:, :, :, None] == self.ids[:-1, :, None, :]).any(axis=3)
        return same.mean(axis=(0, 2))

    def coactivation(self, layer: int) -> Floats:
        """[E, E]: share of rows that select both experts, for MoE layer position `layer`; its diagonal is frequency."""
        chosen = np.zeros((len(self.ids), self.header.num_experts), dtype=np.float32)
        np.put_along_axis(chosen, self.ids[:, layer].astype(np.int64), 1.0, axis=1)
        return (chosen.T @ chosen).astype(np.float64) / max(1, len(self.ids))

    def working_set(self, window: int) -> Floats:
        """[moe layers]: mean number of distinct experts in `window` consecutive rows."""
        rows, layers, _ = self.ids.shape
        starts = range(0, max(1, rows - window + 1), max(1, window // 2))
        sizes = [[len(np.unique(self.ids[s : s + window, i])) for i in range(layers)] for s in starts]
        return np.mean(np.array(sizes, dtype=np.float64), axis=0)


def check_ids(header: TraceHeader, ids: NDArray[np.uint16]) -> None:
    """Raises PlanError: an id the model does not have, or the same expert twice in a row, naming row and layer."""
    if not ids.size:
        return
    bad = ids >= header.num_experts
    if bad.any():
        row, layer, k = (int(i) for i in np.argwhere(bad)[0])
        raise PlanError(
            f"the trace has expert {int(ids[row, layer, k])} in row {row}, layer {header.layers[layer]}; "
            f"the model has {header.num_experts}",
            "record the trace with this model",
        )
    ordered = np.sort(ids, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    if twice.any():
        row, layer = (int(i) for i in np.argwhere(twice)[0])
        raise PlanError(
            f"the trace selects an expert twice in row {row}, layer {header.layers[layer]}", "record the trace again"
        )
