"""The cost model's figures of a cluster: measured once for a model, hosts and versions, then kept in a file.

Wires the measurements to `placement.figures`. A file that cannot be read is measured again, never guessed.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from titan.common.errors import ConfigError, PlanError
from titan.common.log import get_logger
from titan.common.registry import ModelShape
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.coordinator.calibration.local import LocalFigures
from titan.coordinator.calibration.remote import MANY_ROWS, RemoteFigures
from titan.placement.figures import Figures, HomeFigures, WorkerFigures, fit_line
from titan.placement.show import write_file

log = get_logger("coordinator.calibration")


def figures_key(shape: ModelShape, dtype: str, workers: dict[str, str], precision: str = "exact") -> str:
    """Names what figures are good for: model, dtype, this host, the workers with their addresses, versions, precision
    on the wire."""
    parts = [shape.fingerprint, dtype, platform.node(), platform.machine(), SOFTWARE_VERSION, MLX_VERSION]
    parts += [f"{name}@{address}" for name, address in sorted(workers.items())]
    if precision != "exact":
        parts.append(precision)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def home_figures(local: LocalFigures, top_k: int) -> HomeFigures:
    """Fit node 0's line and split a layer into what runs without asking and what asking adds."""
    compute_s, fixed_s = fit_line([(pairs, m.median_s) for pairs, m in local.compute])
    one_row = dict(local.compute)[top_k].median_s
    # Inside a step a layer costs less than alone: the device need not be waited for after each.
    whole_s = local.whole_layer_s if local.whole_layer_s > 0 else one_row
    compute_s = min(compute_s, whole_s / top_k)
    measured = [local.attention_s, local.page_cache_s, *(m for _, m in local.compute)]
    return HomeFigures(
        attention_s=local.attention_s.median_s,
        sync_s=local.sync_s,
        compute_s=compute_s,
        compute_fixed_s=max(0.0, min(fixed_s, whole_s - compute_s * top_k)),
        ssd_s=local.ssd_s.median_s,
        page_cache_s=local.page_cache_s.median_s,
        readers=local.readers,
        spread=max(m.spread for m in measured),
    )


def worker_figures(address: str, remote: RemoteFigures, activation_bytes: int) -> WorkerFigures:
    """Fit a worker's line; what many rows cost beyond it is the link's bandwidth."""
    compute_s, round_trip_s = fit_line([(pairs, m.median_s) for pairs, m in remote.one_row])
    excess_s = remote.many_rows.median_s - (round_trip_s + MANY_ROWS * compute_s)
    moved = 2 * MANY_ROWS * activation_bytes
    limits = excess_s > 0.25 * remote.many_rows.median_s
    return WorkerFigures(
        address=address,
        compute_s=compute_s,
        round_trip_s=round_trip_s,
        bandwidth_bytes_s=moved / excess_s if limits else None,
        spread=max(m.spread for _, m in remote.one_row),
    )


def with_asking(figures: Mapping[str, WorkerFigures], pairs: int, together_s: float) -> dict[str, WorkerFigures]:
    """Figures that say what asking all workers in one layer takes.

    A layer's time is that of its slowest node (5), but one thread serialises requests and takes in answers one after
    another, and on one machine workers share cores. What a request of `pairs` pairs to each took together, beyond the
    slowest alone, is added to every round trip: right where a layer asks all, cautious where it asks one.
    """
    alone_s = max(f.round_trip_s + pairs * f.compute_s for f in figures.values())
    excess_s = max(0.0, together_s - alone_s)
    return {name: replace(f, round_trip_s=f.round_trip_s + excess_s) for name, f in figures.items()}


def load_figures(folder: Path | None, key: str) -> Figures | None:
    """Kept figures for `key`, if there are any that can be read."""
    if folder is None:
        return None
    path = folder / f"figures-{key}.json"
    try:
        figures = Figures.from_json(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, PlanError) as error:
        log.warning("kept figures are not used", file=str(path), error=str(error))
        return None
    return figures if figures.key == key else None


def keep_figures(folder: Path | None, figures: Figures) -> None:
    """Write figures whole or not at all; a folder that cannot be written is no error."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / f"figures-{figures.key}.json", figures.to_json())
    except (OSError, ConfigError) as error:
        log.warning("figures could not be kept", folder=str(folder), error=str(error))
