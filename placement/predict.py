"""What a plan is predicted to do: the step at batch 1 exactly, tokens a second at other batch sizes by sampling.

It knows the routing model and the equations, not how the plan was found.
"""

from __future__ import annotations

import numpy as np

from titan.placement.cost import energy, miss_stall
from titan.placement.evaluate import MISS, Evaluator, Ints
from titan.placement.values import Prediction

SAMPLED_STEPS = 256


def predict(
    evaluator: Evaluator, place: Ints, *, seed: int = 0, steps: int = SAMPLED_STEPS, saved_s: float = 0.0
) -> Prediction:
    """Prediction for an arrangement: expectation over the routing model, with the problem's reuse where it tells of it.

    `saved_s`: what replicas save at batch 1, as measured by dispatch on sampled routing; taken off computing.
    """
    problem = evaluator.problem
    parts = [evaluator.split(i, row) for i, row in enumerate(place)]
    attention = sum(problem.attention_s) + problem.other_s
    sync, stall = sum(p.sync_s for p in parts), sum(p.stall_s for p in parts)
    compute, span = sum(p.compute_s for p in parts), sum(p.span_s for p in parts)
    trip = span - compute
    compute = max(0.0, compute - saved_s)
    step = attention + sync + compute + trip + stall
    rates = tuple(
        (rows, 1 / step if rows == 1 else rows / batch_step(evaluator, place, rows, seed=seed, steps=steps))
        for rows in problem.batch_rows
        if step > 0
    )
    return Prediction(step, attention, sync, compute, trip, stall, rates, _energy(evaluator, place, attention))


def _energy(evaluator: Evaluator, place: Ints, attention_s: float) -> float | None:
    """Expected Phi of a step at batch 1: each node's power for as long as it computes; None where one is not known.

    Node 0 computes attention and its experts, a worker its experts; what they take while they wait is not counted.
    """
    nodes = evaluator.problem.nodes
    used = sorted({0, *np.unique(place[place > 0]).tolist()})
    powers = [nodes[n].power_w for n in used]
    busy = evaluator.busy_s(place)
    busy[0] += attention_s
    total = 0.0
    for n, power_w in zip(used, powers, strict=True):
        if power_w is None:
            return None
        total += energy([power_w], [busy[n]])
    return total


def batch_step(evaluator: Evaluator, place: Ints, rows: int, *, seed: int = 0, steps: int = SAMPLED_STEPS) -> float:
    """Mean seconds of a step of `rows` rows. Attention is taken as independent of the batch (decode is bound by
    reading weights); a worker's request carries each row once; an expert is read from the SSD once a step."""
    total, memo = evaluator.fixed_s, {}
    for layer, row in enumerate(place):
        ratio = evaluator.reuse_ratio(layer, row, rows=rows)
        key = (evaluator.kind[layer], row.tobytes(), ratio)
        if key not in memo:
            ids = evaluator.routing(layer, SAMPLED_STEPS, rows, seed)[:steps]
            memo[key] = float(batch_layer(evaluator, row, ids, ratio).mean())
        total += memo[key]
    return total


def batch_layer(evaluator: Evaluator, row: Ints, ids: Ints, reuse_ratio: float = 1.0):
    """Seconds of one layer's experts for given routing. `row`: [E] arrangement, `ids`: [steps, rows, K] -> [steps]."""
    problem, costs = evaluator.problem, evaluator.costs
    at = row[ids]
    steps = len(ids)
    span = np.zeros(steps)
    home = ((at == 0) | (at == MISS)).sum(axis=(1, 2))
    span = np.where(home > 0, costs.base_s[0] + costs.pair_s[0] * home, 0.0)
    for worker in np.unique(row[row > 0]).tolist():
        hit = at == worker
        pairs, rows = hit.sum(axis=(1, 2)), hit.any(axis=2).sum(axis=1)
        node = problem.nodes[worker]
        wire = problem.activation_bytes / node.bandwidth_bytes_s if node.bandwidth_bytes_s else 0.0
        more = np.maximum(rows - 1, 0) * (2 * wire if problem.reduced else wire)
        span = np.maximum(span, np.where(pairs > 0, costs.base_s[worker] + costs.pair_s[worker] * pairs + more, 0.0))
    seen = np.zeros((steps, len(row)), dtype=bool)
    seen[np.arange(steps)[:, None], ids.reshape(steps, -1)] = True
    missing = (seen & (row == MISS)).sum(axis=1)
    whole = bool((row == 0).all())
    stall = miss_stall(missing, costs.ssd_s, costs.readers) * reuse_ratio
    return span + stall + (0.0 if whole else problem.sync_s)
