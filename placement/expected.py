"""The expected cost of one layer for a placement without replicas, exact under the routing model.

The layer's time is max_n(c_n k_n + rho_0n) + sigma (5). Its distribution function at t is the chance that every node's
count stays under what it can do by t, a coefficient of a product of truncated group polynomials. It knows weights and
figures; layers and plans come from the callers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from titan.placement.cost import Costs, miss_stall
from titan.placement.routing import count_distribution

Floats = NDArray[np.float64]


def expected_max(polynomials: Sequence[Floats], pair_s: Sequence[float], base_s: Sequence[float], top_k: int) -> float:
    """E[max_n(c_n k_n + rho_0n)] over the routing model.

    Args:
        polynomials: per node [K + 1], the polynomial of the experts it executes; e_0 = 1.
        pair_s, base_s: per node, in the same order.
    """
    active = [n for n, p in enumerate(polynomials) if p[1] > 0]
    polys = np.stack([polynomials[n] for n in active])
    pair = np.array([pair_s[n] for n in active])
    base = np.array([base_s[n] for n in active])
    steps = np.arange(1, top_k + 1)
    times = base[:, None] + pair[:, None] * steps  # [nodes, K]
    reachable = polys[:, 1:] > 0
    spans = np.unique(times[reachable])
    able = (times[:, None, :] <= spans[None, :, None] * (1 + 1e-12)).sum(axis=2)  # [nodes, spans]
    mask = np.arange(top_k + 1)[None, None, :] <= able[:, :, None]
    terms = np.where(mask, polys[:, None, :], 0.0)  # [nodes, spans, K + 1]
    total = terms[0]
    for term in terms[1:]:
        product = total * term[:, :1]
        for k in range(1, top_k + 1):
            column = term[:, k : k + 1]
            product[:, k:] += total[:, : top_k + 1 - k] * column
        total = product
    below = total[:, top_k]
    if below[-1] <= 0:
        return 0.0
    below = below / below[-1]
    return float(spans[0] * below[0] + np.sum(spans[1:] * np.diff(below)))


def expected_max_reading(
    groups: Sequence[tuple[Floats, Floats]],
    pair_s: Sequence[float],
    base_s: Sequence[float],
    disks: Sequence[tuple[float, int]],
    top_k: int,
) -> float:
    """E[max_n(c_n k_n + rho_0n + ceil(j_n / w_n) lambda_n)], j_n of the k_n experts being read there first.

    Args:
        groups: per node the polynomials [K + 1] of the experts that it has in memory and of those that it reads.
        pair_s, base_s, disks: per node; of a disk lambda_n and w_n.
    """
    counts = np.arange(top_k + 1)
    times, polys = [], []
    for (held, read), pair, base, (ssd_s, readers) in zip(groups, pair_s, base_s, disks, strict=True):
        executed = counts[:, None] + counts[None, :]  # [held, read]
        taken = np.where(executed > 0, base + pair * executed, 0.0) + miss_stall(counts, ssd_s, readers)[None, :]
        times.append(np.where(executed <= top_k, taken, np.inf))
        polys.append(held[:, None] * read[None, :])
    spans = np.unique(np.concatenate([t[(p > 0) & np.isfinite(t)] for t, p in zip(times, polys, strict=True)]))
    below = np.empty(len(spans))
    for place, span in enumerate(spans):
        total = np.zeros(top_k + 1)
        total[0] = 1.0
        for taken, poly in zip(times, polys, strict=True):
            done = np.where(taken <= span * (1 + 1e-12), poly, 0.0)
            by_count = np.array([np.trace(done[:, ::-1], top_k - k) for k in range(top_k + 1)])
            total = np.convolve(total, by_count)[: top_k + 1]
        below[place] = total[top_k]
    if below[-1] <= 0:
        return 0.0
    below = below / below[-1]
    return float(spans[0] * below[0] + np.sum(spans[1:] * np.diff(below)))


def expected_stall(missing: Floats, others: Floats, costs: Costs, top_k: int) -> float:
    """E[sigma] when the experts with polynomial `missing` are read from node 0's SSD each time they are selected."""
    if missing[1] == 0:
        return 0.0
    chance = count_distribution(missing, others, top_k)
    return float(np.sum(chance * miss_stall(np.arange(top_k + 1), costs.ssd_s, costs.readers)))
