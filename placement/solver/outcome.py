"""The least a layer can cost once it is known how many of the selected experts are where, whatever dispatch does.

Everything here is a lower bound for any placement, replicas included: a selected expert that only workers hold may
still be read from node 0's SSD, and one that node 0 holds may run on a worker that has a replica. It knows figures
and counts, no experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from titan.placement.cost import Costs, miss_stall

Floats = NDArray[np.float64]


class Outcomes:
    """Bounds on max_n(c_n k_n + rho_0n) + sigma by counts.

    Attributes:
        home: [K + 1] seconds of k experts on node 0.
        remote: [K + 1] least seconds in which the workers together execute r experts; inf without workers.
        split: [K + 1, K + 1] least seconds with r remote experts when up to f experts of node 0 have a replica and may
            run on a worker; none is read.
        read: [K + 1] least seconds with r experts on workers only when at least one of them is read instead.
        least: [K + 1, K + 1] least seconds with r experts on workers only and j experts in no memory.
        first_s, pair_s: least seconds of a worker's call before its experts, and of one expert.
    """

    def __init__(self, costs: Costs, workers: list[int], top_k: int) -> None:
        counts = np.arange(top_k + 1)
        self.stall = miss_stall(counts, costs.ssd_s, costs.readers)
        self.home = np.where(counts > 0, costs.base_s[0] + costs.pair_s[0] * counts, 0.0)
        self.remote = _water_fill(costs, workers, top_k)
        self.pair_s = min((costs.pair_s[n] for n in workers), default=0.0)
        self.first_s = min((costs.base_s[n] for n in workers), default=0.0)
        bare = np.maximum(self.home[::-1], self.remote)
        self.split = np.array([[np.min(bare[r : r + f + 1]) for f in range(top_k + 1)] for r in range(top_k + 1)])
        self.least = np.full((top_k + 1, top_k + 1), np.inf)
        self.read = np.full(top_k + 1, np.inf)
        for r in range(top_k + 1):
            for j in range(top_k + 1 - r):
                for reads in range(r + 1):
                    for moved in range(top_k - r - j + 1):
                        away = r - reads + moved
                        cost = max(self.home[top_k - away], self.remote[away]) + self.stall[j + reads]
                        self.least[r, j] = min(self.least[r, j], cost)
                        if reads and not j:
                            self.read[r] = min(self.read[r], cost)

    def deep(self, costs: Costs, workers: list[int]) -> Floats:
        """[K + 1, K + 1]: least seconds when r selected experts are not on node 0 and k of them on `workers` alone.

        Any of them may be read instead, any of node 0's may have a replica. Without workers the k are in no memory.
        """
        top_k = len(self.home) - 1
        run = _water_fill(costs, workers, top_k)
        out = np.full((top_k + 1, top_k + 1), np.inf)
        for r in range(top_k + 1):
            moved = np.arange(top_k - r + 1)[None, None, :]
            for k in range(r + 1):
                deep_reads, other_reads = np.arange(k + 1)[:, None, None], np.arange(r - k + 1)[None, :, None]
                reads = deep_reads + other_reads
                away = r - reads + moved
                span = np.maximum(np.maximum(self.home[top_k - away], self.remote[away]), run[k - deep_reads])
                out[r, k] = np.min(span + self.stall[reads])
        return out


def _water_fill(costs: Costs, workers: list[int], top_k: int) -> Floats:
    """g(r): least makespan of r experts over all workers, each charged its round trip only when used."""
    times = sorted(costs.base_s[n] + costs.pair_s[n] * k for n in workers for k in range(1, top_k + 1))
    out = np.full(top_k + 1, np.inf)
    out[0] = 0.0
    for r in range(1, min(top_k, len(times)) + 1):
        out[r] = times[r - 1]
    return out
