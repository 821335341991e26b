"""How many predicted experts are worth reading ahead: the prefetch condition (9), expert by expert. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Costs", "prefetch_gain"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds.

    Args:
        fetch_s: lambda, one expert read on demand.
        layer_s: tau_l, from one layer's routing to the next one's, without stalls.
        useless_s: kappa, what a prefetch costs the critical path by being read at all.
        readers: w; prefetches use one less.
        saved_s: stall an expert that is missed: lambda for one alone, less where several are read at once.
    """

    fetch_s: float
    layer_s: float
    useless_s: float
    readers: int
    saved_s: float


def prefetch_gain(chances: Sequence[float], depth: int, costs: Costs) -> tuple[int, float]:
    """(m, seconds a layer) of the best number of absent experts to prefetch; (0, 0.0) when none pays.

    Condition (9), r' min(lambda, d tau) > m (1 - q) kappa / (K (1 - h)), multiplied by K (1 - h): the expert at rank i
    is needed with the chance p_i, so m of them gain sum p_i min(saved, lead_i) - m kappa, where lead_i is d tau less
    the time that the prefetches before it hold the readers. Unlike (9) it charges kappa for needed experts too: read on
    demand, they slow nothing that would be computed meanwhile.

    Args:
        chances: p_i by rank.
        depth: d.
    """
    lanes = costs.readers - 1
    best, best_gain, gain = 0, 0.0, 0.0
    if lanes < 1:
        return 0, 0.0
    for rank, chance in enumerate(chances):
        lead = depth * costs.layer_s - (rank // lanes) * costs.fetch_s
        gain += chance * min(costs.saved_s, max(0.0, lead)) - costs.useless_s
        if gain > best_gain:
            best, best_gain = rank + 1, gain
    return best, best_gain
