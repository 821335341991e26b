"""Which workers read what no memory holds: experts that node 0 would read move to disks beside it, layer by layer.

A worker's reads go on beside those of the other workers; in the layer's time they stand inside the maximum over nodes.
It knows arrangements and exact expected times; whether the gain is worth it is decided by the caller.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from titan.placement.arrangement import memory_used
from titan.placement.evaluate import MISS, Evaluator, Ints
from titan.placement.problem import Problem

BLOCKS = (1, 2, 4, 8, 16, 32, 64)


def readers_of(problem: Problem) -> list[int]:
    """Workers whose time of a read is known: those that can read."""
    return [n for n, node in enumerate(problem.nodes) if n and node.ssd_s > 0]


def read_elsewhere(evaluator: Evaluator, place: Ints, deadline: float) -> Ints:
    """An arrangement that is nowhere slower, with `MISS - n` for experts that worker n reads.

    Descends by blocks, spread over the experts' frequencies; the best of all moves is taken each time. A worker needs
    top-k slots in a layer in which it reads: its experts' there, memory that is free, or slots it has in another layer.
    """
    problem, out = evaluator.problem, place.copy()
    workers = readers_of(problem)
    free = [node.memory_bytes - int(u) for node, u in zip(problem.nodes, memory_used(problem, place), strict=True)]
    known: dict[tuple, Ints] = {}
    for layer in range(len(place)):
        if not (out[layer] == MISS).any() or time.monotonic() > deadline:
            continue
        size, keep = problem.expert_bytes[layer], min(problem.top_k, problem.num_experts)
        lacking = {n: max(0, keep - int((out[layer] == n).sum())) * size for n in workers}
        able = tuple(n for n in workers if lacking[n] <= max(0, free[n]))
        key = (evaluator.kind[layer], out[layer].tobytes(), able)
        if key not in known:
            known[key] = _descend(evaluator, layer, out[layer], able)
        out[layer] = known[key]
        for n in able:
            if (out[layer] == MISS - n).any():
                free[n] -= lacking[n]
    for layer in range(len(place)):
        for n in workers:
            if (out[layer] == MISS).any() and time.monotonic() < deadline:
                _make_room(evaluator, out, layer, n)
    return out


def _make_room(evaluator: Evaluator, out: Ints, layer: int, n: int) -> None:
    """Give worker n cache slots in a layer, of those it has most of in another one, where both together gain.

    The experts that lose their place there, the least frequent, it reads from then on.
    """
    problem, keep = evaluator.problem, min(evaluator.problem.top_k, evaluator.problem.num_experts)
    held = (out == n).sum(axis=1)
    if (out[layer] == MISS - n).any():
        return
    giver = int(np.argmax(np.where(np.arange(len(out)) == layer, -1, held)))
    lacking = max(0, keep - int(held[layer])) * problem.expert_bytes[layer]
    given = -(-lacking // problem.expert_bytes[giver])
    if not 0 < given <= held[giver] - keep:
        return
    mine = np.flatnonzero(out[giver] == n)
    poorer = out[giver].copy()
    poorer[mine[np.argsort(evaluator.weights[giver][mine], kind="stable")[:given]]] = MISS - n
    richer = _descend(evaluator, layer, out[layer], (n,))
    before_s = evaluator.layer(layer, out[layer]) + evaluator.layer(giver, out[giver])
    if evaluator.layer(layer, richer) + evaluator.layer(giver, poorer) < before_s:
        out[layer], out[giver] = richer, poorer


def _descend(evaluator: Evaluator, layer: int, row: Ints, workers: tuple[int, ...]) -> Ints:
    best, best_s = row, evaluator.layer(layer, row)
    order = np.argsort(-evaluator.weights[layer], kind="stable")
    while True:
        found = None
        for source in (MISS, *(MISS - n for n in workers)):
            there = order[best[order] == source]
            for block in {min(b, len(there)) for b in BLOCKS if len(there)}:
                chosen = there[np.linspace(0, len(there) - 1, block).round().astype(int)]
                for target in (MISS, *(MISS - n for n in workers)):
                    if target == source:
                        continue
                    tried = best.copy()
                    tried[chosen] = target
                    taken_s = evaluator.layer(layer, tried)
                    if taken_s < best_s * (1 - 1e-9):
                        found, best_s = tried, taken_s
        if found is None:
            return best
        best = found


def relaxed(problem: Problem) -> Problem:
    """The problem in which every worker that reads has room for all experts.

    Whatever a worker reads it then has in memory, at no cost: no plan, with workers' disks or without, is quicker than
    the best one here.
    """
    everything = sum(problem.expert_bytes) * problem.num_experts
    able = set(readers_of(problem))
    nodes = tuple(
        replace(node, memory_bytes=max(node.memory_bytes, everything)) if n in able else node
        for n, node in enumerate(problem.nodes)
    )
    return replace(problem, nodes=nodes)


def least_reading_s(evaluator: Evaluator) -> float:
    """Seconds of reading that no plan's expected step goes without, whoever reads.

    So many experts as all memory together does not hold are read whenever they are selected; at best the least
    frequent ones, all readers of all disks at once: a layer that reads j experts takes lambda ceil(j / w) >= lambda j /
    min(w, K).
    """
    problem = evaluator.problem
    disks = [problem.nodes[0], *(problem.nodes[n] for n in readers_of(problem))]
    fit = sum(node.memory_bytes // min(problem.expert_bytes) for node in problem.nodes)
    absent = len(problem.layers) * problem.num_experts - fit
    if absent <= 0:
        return 0.0
    frequencies = np.sort(np.concatenate([evaluator.frequencies(i) for i in range(len(problem.layers))]))
    at_once = min(sum(node.readers for node in disks), problem.top_k)
    return min(node.ssd_s for node in disks) * float(frequencies[:absent].sum()) / at_once
