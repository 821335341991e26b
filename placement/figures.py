"""From measured times to the cost model's figures: lines through points, and a value that can be kept.

Pure. Knows neither how times were measured nor where figures are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from titan.common.errors import PlanError

FIGURES_VERSION = 1
MAX_FIGURES_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HomeFigures:
    """Node 0: seconds.

    Args:
        attention_s: a MoE layer without its experts (tau_attn), with its share of head and embeddings.
        sync_s: what asking a layer costs over running it without asking.
        compute_s, compute_fixed_s: c_0 and what a layer's experts cost before the first pair.
        ssd_s, page_cache_s: an expert from disk (lambda), cold and cached.
        readers: parallel readers that still help (w).
        spread: the largest relative spread of what these were made of.
    """

    attention_s: float
    sync_s: float
    compute_s: float
    compute_fixed_s: float
    ssd_s: float
    page_cache_s: float
    readers: int
    spread: float


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """A worker as node 0 sees it over one address.

    Args:
        compute_s: c_n, and what a pair's result costs on the way.
        round_trip_s: rho_0n with everything a request costs before its first pair.
        bandwidth_bytes_s: beta_0n; None where it never limits.
    """

    address: str
    compute_s: float
    round_trip_s: float
    bandwidth_bytes_s: float | None
    spread: float


@dataclass(frozen=True, slots=True)
class Figures:
    """All that was measured for one model on one cluster; `key` says for which (fingerprint, hosts, versions)."""

    key: str
    home: HomeFigures
    workers: dict[str, WorkerFigures]
    version: int = FIGURES_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Figures:
        """Parse and check.

        Raises:
            PlanError: another version, a field missing, a figure that is negative or not a number.
        """
        try:
            if len(text) > MAX_FIGURES_BYTES:
                raise PlanError(f"kept figures of {len(text)} bytes are too many", "measure again")
            raw = json.loads(text)
            if raw["version"] != FIGURES_VERSION:
                raise PlanError(f"kept figures have version {raw['version']!r}", "measure again")
            figures = Figures(
                key=str(raw["key"]),
                home=HomeFigures(**raw["home"]),
                workers={str(name): WorkerFigures(**value) for name, value in raw["workers"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanError(
                f"kept figures cannot be read ({type(error).__name__}: {error})", "measure again"
            ) from error
        for part in (figures.home, *figures.workers.values()):
            for name, value in asdict(part).items():
                if name == "address" or (name == "bandwidth_bytes_s" and value is None):
                    continue
                if not isinstance(value, (int, float)) or not np.isfinite(value) or value < 0:
                    raise PlanError(f"kept figure {name} is {value!r}", "measure again")
        return figures


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds a pair, fixed seconds) of the line through (pairs, seconds) points; neither is negative.

    It has the least relative error: decode lives at few pairs, where an error of 50 µs matters more than at 64 rows.
    """
    pairs = np.array([p for p, _ in points], float)
    seconds = np.array([s for _, s in points], float)
    weight = 1 / np.maximum(seconds, 1e-9)
    if len(points) == 1:
        return float(seconds[0] / pairs[0]), 0.0
    design = np.stack([pairs, np.ones_like(pairs)], axis=1) * weight[:, None]
    slope, fixed = np.linalg.lstsq(design, seconds * weight, rcond=None)[0]
    if fixed < 0:
        return float(np.sum(pairs * seconds * weight**2) / np.sum(pairs**2 * weight**2)), 0.0
    if slope < 0:
        return 0.0, float(np.sum(seconds * weight**2) / np.sum(weight**2))
    return float(slope), float(fixed)
