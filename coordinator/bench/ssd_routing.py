"""What the router chose, and what slot tables make of it: traces with a given reuse, simulated misses. No MLX."""

from __future__ import annotations

import numpy as np

from titan.common.slots import SlotTable, make_policies
from titan.placement.simulate import Table

__all__ = ["drawn_routing", "reuse_of", "simulated_misses"]


def drawn_routing(tokens: int, layers: int, experts: int, top_k: int, reuse: float, seed: int = 0) -> np.ndarray:
    """[tokens, layers, K] distinct experts: each of the token before is chosen again with the chance `reuse`, the
    others are drawn from those it did not choose."""
    random = np.random.default_rng(seed)
    ids = np.empty((tokens, layers, top_k), np.int64)
    for layer in range(layers):
        before = random.permutation(experts)[:top_k]
        for token in range(tokens):
            kept = before[random.random(top_k) < reuse]
            others = np.setdiff1d(np.arange(experts), before)
            before = np.concatenate([kept, random.choice(others, top_k - len(kept), replace=False)])
            ids[token, layer] = before
    return ids


def reuse_of(ids: np.ndarray) -> float:
    """Share of a token's experts that the token before it chose too; ids: [tokens, layers, K]."""
    if len(ids) < 2:
        return 0.0
    return float((ids[1:, :, :, None] == ids[:-1, :, None, :]).any(axis=-1).mean())


def simulated_misses(ids: np.ndarray, slots: int, policy: str, experts: int) -> np.ndarray:
    """[tokens, layers] misses of tables that are empty at first; policy: one that serves, or "belady"."""
    tokens, layers, _ = ids.shape
    if policy == "belady":
        rows = [ids[:, layer].tolist() for layer in range(layers)]
        ideal = [Table(slots, "belady", row) for row in rows]
        return np.array([[len(t.step(row[i])) for t, row in zip(ideal, rows, strict=True)] for i in range(tokens)])
    tables = [SlotTable(slots, p) for p in make_policies(policy, experts, layers)]
    misses = np.zeros((tokens, layers), np.int64)
    for token in range(tokens):
        for layer, table in enumerate(tables):
            chosen: list[int] = ids[token, layer].tolist()
            missing = table.look_up(chosen)
            table.reserve(missing, frozenset(chosen))
            for expert in missing:
                table.map(expert)
            misses[token, layer] = len(missing)
    return misses
