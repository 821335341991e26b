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
        useless_s: kappa, what a prefetch that nobody needed costs the critical path.
        readers: w; prefetches use one less.
    """

    fetch_s: float
    layer_s: float
    useless_s: float
    readers: int


def prefetch_gain(chances: Sequence[float], depth: int, costs: Costs) -> tuple[int, float]:
    """(m, seconds a layer) of the best number of absent experts to prefetch; (0, 0.0) when none pays.

    Condition (9), r' min(lambda, d tau) > m (1 - q) kappa / (K (1 - h)), multiplied by K (1 - h): the expert at rank i
    is needed with the chance p_i, so m of them gain sum p_i min(lambda, lead_i) - sum (1 - p_i) kappa, where lead_i is
    d tau less the time that the prefetches before it hold the readers.

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
        gain += chance * min(costs.fetch_s, max(0.0, lead)) - (1 - chance) * costs.useless_s
        if gain > best_gain:
            best, best_gain = rank + 1, gain
    return best, best_gain
