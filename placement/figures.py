"""From measured times to the cost model's figures: lines through points, and a value that can be kept.

Pure. Knows neither how times were measured nor where figures are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from titan.common.errors import PlanError
from titan.common.units import format_seconds

FIGURES_VERSION = 3
MAX_FIGURES_BYTES = 1 << 20
MAX_TEXT = 512
TEXTS = ("address", "transport")
MAY_BE_ABSENT = ("bandwidth_bytes_s", "power_w", "ssd_s")
MAX_READERS = 1024


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
        choice_s: what choosing among the workers that are there adds to asking a layer.
        others_cores: cores of this machine that other programs used at the quietest.
        power_w: package power under load (P_0); None where the system does not tell.
    """

    attention_s: float
    sync_s: float
    compute_s: float
    compute_fixed_s: float
    ssd_s: float
    page_cache_s: float
    readers: int
    spread: float
    choice_s: float = 0.0
    others_cores: float = 0.0
    power_w: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """A worker as node 0 sees it over one address.

    Args:
        compute_s: c_n, and what a pair's result costs on the way.
        round_trip_s: rho_0n with everything a request costs before its first pair.
        bandwidth_bytes_s: beta_0n; None where it never limits.
        transport: that was used and will be.
        latency_s: of the way alone, without what a request costs on either side of it.
        wire: (bytes there and back, seconds, spread) that bandwidth and latency were fitted to.
        power_w: package power under load (P_n); None where the system does not tell.
        ssd_s: an expert from its own disk (lambda_n), as it reads; None where it has nothing to read from.
        readers: of its reads at once that still help (w_n).
        ssd_spread: of what ssd_s was made of.
    """

    address: str
    compute_s: float
    round_trip_s: float
    bandwidth_bytes_s: float | None
    spread: float
    transport: str = ""
    latency_s: float = 0.0
    wire: tuple[tuple[int, float, float], ...] = ()
    power_w: float | None = None
    ssd_s: float | None = None
    readers: int = 1
    ssd_spread: float = 0.0

    def layer_s(self, pairs: int, row_bytes: int) -> float:
        """Seconds of a layer in which one row's `pairs` are executed there; `row_bytes` is a row on the wire."""
        row_s = row_bytes / self.bandwidth_bytes_s if self.bandwidth_bytes_s else 0.0
        return self.round_trip_s + row_s + pairs * (self.compute_s + row_s)


@dataclass(frozen=True, slots=True)
class Figures:
    """All that was measured for one model on one cluster; `key` says for which (fingerprint, hosts, versions).

    Args:
        workers: over the address that is used first.
        elsewhere: the same over a worker's other addresses.
        unreached: a worker's addresses that did not answer.
    """

    key: str
    home: HomeFigures
    workers: dict[str, WorkerFigures]
    elsewhere: dict[str, tuple[WorkerFigures, ...]] = field(default_factory=dict)
    unreached: dict[str, tuple[str, ...]] = field(default_factory=dict)
    version: int = FIGURES_VERSION

    def at(self, name: str, address: str) -> WorkerFigures | None:
        """A worker's figures over one address; None when it was not measured there."""
        known = (*([self.workers[name]] if name in self.workers else []), *self.elsewhere.get(name, ()))
        return next((f for f in known if f.address == address), None)

    def why_address(self, name: str, address: str, pairs: int, row_bytes: int) -> str | None:
        """Why a worker is reached at `address`, in words; None when not measured there, or without a choice."""
        used = self.at(name, address)
        known = (*([self.workers[name]] if name in self.workers else []), *self.elsewhere.get(name, ()))
        others, dead = [f for f in known if f is not used], self.unreached.get(name, ())
        if used is None or not (others or dead):
            return None
        words = [f"{format_seconds(used.layer_s(pairs, row_bytes))} a layer over {used.transport or 'it'}"]
        words += [f"{f.address} takes {format_seconds(f.layer_s(pairs, row_bytes))}" for f in others]
        words += [f"{other} did not answer" for other in dead]
        return ", ".join(words)

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
                workers={str(name): _worker(value) for name, value in raw["workers"].items()},
                elsewhere={str(n): tuple(_worker(v) for v in some) for n, some in raw["elsewhere"].items()},
                unreached={str(n): tuple(str(a) for a in some) for n, some in raw["unreached"].items()},
            )
            checked = (
                figures.home,
                *figures.workers.values(),
                *(f for some in figures.elsewhere.values() for f in some),
            )
            for part in checked:
                for name, value in asdict(part).items():
                    _check(name, value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanError(
                f"kept figures cannot be read ({type(error).__name__}: {error})", "measure again"
            ) from error
        return figures


def _worker(raw: dict) -> WorkerFigures:
    figures = WorkerFigures(**raw)
    return replace(figures, wire=tuple((nbytes, seconds, spread) for nbytes, seconds, spread in figures.wire))


def _check(name: str, value: object) -> None:
    if name == "wire":
        for point in value:  # type: ignore[union-attr]
            for number in point:
                _check("wire time", number)
    elif name in TEXTS:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise PlanError(f"kept figure {name} is {str(value)[:64]!r}", "measure again")
    elif value is None and name in MAY_BE_ABSENT:
        return
    elif name == "readers":
        if type(value) is not int or not 1 <= value <= MAX_READERS:
            raise PlanError(f"kept figure {name} is {value!r}", "measure again")
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value) or value < 0:
        raise PlanError(f"kept figure {name} is {value!r}", "measure again")


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
