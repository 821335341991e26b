"""Equations (5) to (9) of the formulation as pure functions. They know figures, not plans or traces.

Arrays broadcast: the last axis is the node wherever one is named, leading axes are steps or layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from titan.placement.values import Node

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """The figures of all nodes that a layer's latency needs, indexed by node.

    Args:
        pair_s: seconds a (row, expert) pair: c_n, plus its result's time on the link (rho_0n(bytes) is linear).
        base_s: seconds a node that executes anything costs before its first pair: round trip rho_0n with the
            activation row on the link, and the fixed part of computing. For node 0 the fixed part alone.
        fixed_s: the part of `base_s` that is computing.
        ssd_s: seconds to bring one missing expert to node 0 (lambda).
        readers: parallel readers of node 0 (w).
    """

    pair_s: tuple[float, ...]
    base_s: tuple[float, ...]
    fixed_s: tuple[float, ...]
    ssd_s: float
    readers: int

    @staticmethod
    def of(nodes: Sequence[Node], activation_bytes: int = 0, *, warm: bool = False, reduced: bool = False) -> Costs:
        """Costs of one row. `warm` takes the page cache's lambda where it was measured; with wire precision `reduced`
        one result a row comes back instead of one a pair.
        """
        wire = [
            activation_bytes / n.bandwidth_bytes_s if n.bandwidth_bytes_s and i else 0.0 for i, n in enumerate(nodes)
        ]
        home = nodes[0]
        return Costs(
            pair_s=tuple(n.compute_s + (0.0 if reduced else w) for n, w in zip(nodes, wire, strict=True)),
            base_s=tuple(
                n.compute_fixed_s + (n.round_trip_s + (2 * w if reduced else w) if i else 0.0)
                for i, (n, w) in enumerate(zip(nodes, wire, strict=True))
            ),
            fixed_s=tuple(n.compute_fixed_s for n in nodes),
            ssd_s=home.page_cache_s if warm and home.page_cache_s is not None else home.ssd_s,
            readers=home.readers,
        )


def node_times(counts: ArrayLike, pair_s: ArrayLike, base_s: ArrayLike) -> Floats:
    """c_n k_n + rho_0n 1[k_n > 0] of (5) per node. `counts`: [..., nodes] (row, expert) pairs."""
    k = np.asarray(counts, dtype=np.float64)
    return np.where(k > 0, k * np.asarray(pair_s) + np.asarray(base_s), 0.0)


def layer_latency(counts: ArrayLike, pair_s: ArrayLike, base_s: ArrayLike, attention_s: ArrayLike, stall_s: ArrayLike):
    """One layer's term of (5): tau_attn + max_n(c_n k_n + rho_0n) + sigma. `counts`: [..., nodes] -> [...]."""
    return np.asarray(attention_s) + node_times(counts, pair_s, base_s).max(axis=-1) + np.asarray(stall_s)


def step_latency(counts: ArrayLike, pair_s: ArrayLike, base_s: ArrayLike, attention_s: ArrayLike, stall_s: ArrayLike):
    """Lambda_t of (5): the layers' terms summed. `counts`: [..., layers, nodes] -> [...]."""
    return layer_latency(counts, pair_s, base_s, attention_s, stall_s).sum(axis=-1)


def stall(fetch_s: Sequence[float], lead_s: Sequence[float] | None = None) -> float:
    """sigma_{t,l} of (6): max(0, max_e(lambda_tier(e) - eta_e)) over the demand misses; lead 0 when not prefetched."""
    leads = lead_s if lead_s is not None else [0.0] * len(fetch_s)
    return max((max(0.0, fetch - lead) for fetch, lead in zip(fetch_s, leads, strict=True)), default=0.0)


def miss_stall(misses: ArrayLike, ssd_s: float, readers: int) -> Floats:
    """sigma for a number of misses read `readers` at a time: ceil(j / w) lambda, the form (8) starts from."""
    return np.ceil(np.asarray(misses, dtype=np.float64) / readers) * ssd_s


def energy(power_w: ArrayLike, busy_s: ArrayLike) -> float:
    """Phi_t = sum_n P_n Lambda^(n)_t, in joules; `busy_s` is how long node n worked during the step."""
    return float(np.sum(np.asarray(power_w, dtype=np.float64) * np.asarray(busy_s, dtype=np.float64)))


def communication(cost_per_byte: ArrayLike, activation_bytes: ArrayLike, weight_bytes: ArrayLike = 0) -> float:
    """Gamma_t = sum_{n != 0} beta_0n (activation bytes + weight bytes moved); one entry a worker."""
    moved = np.asarray(activation_bytes, dtype=np.float64) + np.asarray(weight_bytes, dtype=np.float64)
    return float(np.sum(np.asarray(cost_per_byte, dtype=np.float64) * moved))


def objective(
    latency_s: ArrayLike, energy_j: ArrayLike, traffic: ArrayLike, *, energy_weight: float, traffic_weight: float
) -> float:
    """(7) over sampled steps: mean of Lambda_t + lambda Phi_t + mu Gamma_t."""
    total = np.asarray(latency_s) + energy_weight * np.asarray(energy_j) + traffic_weight * np.asarray(traffic)
    return float(np.mean(total))


def stall_without_prefetch(top_k: int, hit_rate: float, readers: int, fetch_s: float) -> float:
    """sigma_0 = ceil(K (1 - h) / w) lambda, per layer."""
    return _rounds(top_k * (1 - hit_rate), readers) * fetch_s


def stall_with_prefetch(
    top_k: int, hit_rate: float, recall: float, readers: int, fetch_s: float, depth: int, layer_s: float
) -> float:
    """sigma_d of (8). `recall` is r', among the experts that would have missed; `layer_s` is tau_l; `depth` is d."""
    missing = top_k * (1 - hit_rate)
    unseen = _rounds(missing * (1 - recall), readers) * fetch_s
    return unseen + _rounds(missing * recall, readers) * max(0.0, fetch_s - depth * layer_s)


def prefetch_can_pay(
    top_k: int,
    hit_rate: float,
    recall: float,
    precision: float,
    predicted: int,
    fetch_s: float,
    depth: int,
    layer_s: float,
    install_s: float,
) -> bool:
    """Condition (9): r' min(lambda, d tau_l) > m (1 - q) kappa / (K (1 - h)). False when nothing would miss.

    Args:
        predicted: experts predicted a layer (m).
        precision: q of the predictor.
        install_s: what a useless fetch costs on the critical path (kappa).
    """
    missing = top_k * (1 - hit_rate)
    if missing <= 0:
        return False
    return recall * min(fetch_s, depth * layer_s) > predicted * (1 - precision) * install_s / missing


def depth_to_hide(fetch_s: float, layer_s: float, layers: int) -> int | None:
    """Smallest d with d tau_l >= lambda, after (9); None when a token's layers are not enough to hide the fetch."""
    depth = math.ceil(fetch_s / layer_s - 1e-12)
    return depth if depth < layers else None


def _rounds(experts: float, readers: int) -> int:
    return math.ceil(experts / readers - 1e-12)
