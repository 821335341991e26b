"""The cost model's figures of a cluster: measured once for a model, hosts and versions, then kept in a file.

Wires the measurements to `placement.figures`. A file that cannot be read is measured again, never guessed.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from titan.common.errors import ConfigError, PlanError
from titan.common.log import get_logger
from titan.common.registry import ModelShape
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.coordinator.calibration.local import LocalFigures
from titan.coordinator.calibration.reads import ReadFigures
from titan.coordinator.calibration.remote import RemoteFigures
from titan.placement.figures import Figures, HomeFigures, WorkerFigures, fit_line
from titan.placement.show import write_file

log = get_logger("coordinator.calibration")

LINK_LIMITS = 0.25  # of the time of 64 rows: below, what bytes cost is lost in what the round trip costs


def figures_key(shape: ModelShape, dtype: str, workers: Mapping[str, Sequence[str]]) -> str:
    """Names what figures are good for: model, dtype, this host, the workers with all addresses, versions."""
    parts = [shape.fingerprint, dtype, platform.node(), platform.machine(), SOFTWARE_VERSION, MLX_VERSION]
    parts += [f"{name}@{','.join(addresses)}" for name, addresses in sorted(workers.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def home_figures(local: LocalFigures, top_k: int) -> HomeFigures:
    """Fit node 0's line and split a layer into what runs without asking and what asking adds."""
    compute_s, fixed_s = fit_line([(pairs, m.median_s) for pairs, m in local.compute])
    one_row = dict(local.compute)[top_k].median_s
    # Inside a step a layer costs less than alone: the device need not be waited for after each.
    quicker_s = min(local.answered.median_s, local.asked.median_s)  # asking can help: no long graph is kept
    whole_s = (quicker_s - local.without.median_s) / local.layers
    if whole_s <= 0:
        whole_s = one_row
    compute_s = min(compute_s, whole_s / top_k)
    beyond_s = 0.0  # what a miss costs beside its read: making room, mapping the slot, waking readers
    if local.missed is not None:
        rounds = -(-local.misses // local.readers)
        miss_s = (local.missed.median_s - local.asked.median_s) / local.layers / rounds
        beyond_s = max(0.0, miss_s - local.page_cache.median_s)
    measured = [local.without, local.page_cache, *(m for _, m in local.compute)]
    return HomeFigures(
        attention_s=local.without.median_s / local.layers,
        sync_s=max(0.0, (local.asked.median_s - quicker_s) / local.layers),
        compute_s=compute_s,
        compute_fixed_s=max(0.0, min(fixed_s, whole_s - compute_s * top_k)),
        ssd_s=local.ssd.median_s + beyond_s,
        page_cache_s=local.page_cache.median_s + beyond_s,
        readers=local.readers,
        spread=max(m.spread for m in measured),
        others_cores=local.without.others_cores,
        power_w=local.power_w,
    )


def worker_figures(
    address: str, remote: RemoteFigures, sync_s: float, row_bytes: int, power_w: float | None
) -> WorkerFigures:
    """Fit a worker's line and its link's.

    Args:
        sync_s: what asking costs in any layer, which the layers that were measured contain.
        row_bytes: one activation row, one way.
    """
    per_byte_s, latency_s = fit_line([(nbytes, m.median_s) for nbytes, m in remote.wire])
    most_bytes, most = remote.wire[-1]
    limits = per_byte_s * most_bytes > LINK_LIMITS * most.median_s
    row_s = per_byte_s * row_bytes if limits else 0.0
    pair_s, layer_s = fit_line([(pairs, m.median_s) for pairs, m in remote.layer])
    return WorkerFigures(
        address=address,
        compute_s=max(0.0, pair_s - row_s),
        round_trip_s=max(0.0, layer_s - sync_s - row_s),
        bandwidth_bytes_s=1 / per_byte_s if limits else None,
        spread=max(m.spread for _, m in (*remote.layer, *remote.wire)),
        transport=remote.transport,
        latency_s=latency_s,
        wire=tuple((nbytes, m.median_s, m.spread) for nbytes, m in remote.wire),
        power_w=power_w,
    )


def with_reads(figures: WorkerFigures, reads: ReadFigures | None) -> WorkerFigures:
    """The figures with what reading from the worker's own disk takes, where that was measured."""
    if reads is None:
        return figures
    return replace(figures, ssd_s=reads.one.median_s, readers=reads.readers, ssd_spread=reads.one.spread)


def with_sharing(
    figures: Mapping[str, WorkerFigures],
    asked: Mapping[str, int],
    home: HomeFigures,
    home_pairs: int,
    row_bytes: int,
    together_s: float,
) -> dict[str, WorkerFigures]:
    """Figures that say what it costs to use several nodes in one layer.

    A layer's time is that of its slowest node (5), but one thread serialises requests and takes in answers one after
    another, and processes on one machine share its cores. What a layer took in which all had a share, beyond the
    slowest alone, is added to every round trip: right where a layer uses all, cautious where it uses one.

    Args:
        asked: pairs of each worker; `home_pairs` those of node 0.
    """
    alone_s = max(figures[name].layer_s(pairs, row_bytes) for name, pairs in asked.items())
    alone_s = max(alone_s, home.compute_fixed_s + home_pairs * home.compute_s if home_pairs else 0.0)
    excess_s = max(0.0, together_s - home.sync_s - alone_s)
    return {
        name: replace(f, round_trip_s=f.round_trip_s + excess_s) if name in asked else f for name, f in figures.items()
    }


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
