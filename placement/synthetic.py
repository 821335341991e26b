"""Traces made up for planning and tests: skew between experts, reuse from row to row, drift over time.

It knows the distribution it draws from, no model.
"""

from __future__ import annotations

import numpy as np

from titan.placement.trace import Trace, TraceHeader


def synthetic_trace(
    header: TraceHeader,
    rows: int,
    *,
    zipf: float = 0.0,
    reuse: float = 0.0,
    drift: float = 0.0,
    seed: int = 0,
) -> Trace:
    """`rows` rows, one a step.

    Args:
        zipf: exponent of the experts' weights i^-zipf, in an order of each layer's own.
        reuse: chance that an expert of the previous row is selected again beyond what the weights give.
        drift: share of the experts that swap weights with another one over 1,000 rows.
    """
    header.check()
    layers, experts, top_k = len(header.layers), header.num_experts, header.top_k
    rng = np.random.default_rng(seed)
    logits = np.stack([rng.permutation(-zipf * np.log(np.arange(1, experts + 1))) for _ in range(layers)])
    ids = np.empty((rows, layers, top_k), dtype=np.uint16)
    swaps = rng.random((rows, layers)) < drift * experts / 2000 if drift else None
    everyone = np.arange(layers)
    for t in range(rows):
        if swaps is not None:
            for layer in np.flatnonzero(swaps[t]):
                a, b = rng.choice(experts, 2, replace=False)
                logits[layer, [a, b]] = logits[layer, [b, a]]
        score = logits + rng.gumbel(size=(layers, experts))  # the top k draw without replacement by weight
        if reuse and t:
            kept = rng.random((layers, top_k)) < reuse
            score[everyone[:, None].repeat(top_k, 1)[kept], ids[t - 1].astype(np.int64)[kept]] = np.inf
        ids[t] = np.sort(np.argpartition(-score, top_k - 1, axis=1)[:, :top_k], axis=1)
    return Trace(header, ids, np.arange(rows))
