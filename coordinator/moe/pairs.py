"""A layer's (row, expert) pairs, divided among those who execute them and joined again. Pure functions over arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

SAME_WITHIN = 0.03  # of the largest value: bfloat16 keeps 8 bits

FEW_PAIRS = 64  # up to here a loop over Python numbers is faster than numpy's passes


def divide(experts: np.ndarray, owners: Mapping[int, int], count: int) -> list[np.ndarray]:
    """experts: [P] -> for each of `count` owners the places of its pairs, ascending; last, those of nobody."""
    if experts.size <= FEW_PAIRS:
        places: list[list[int]] = [[] for _ in range(count + 1)]
        for place, expert in enumerate(experts.tolist()):
            places[owners.get(expert, count)].append(place)
        return [np.array(mine, np.intp) for mine in places]
    of_expert = np.full(int(experts.max()) + 1, count, np.int16)
    of_expert[list(owners)] = list(owners.values())
    owner = of_expert[experts]
    return [np.flatnonzero(owner == number) for number in range(count + 1)]


def used_rows(bits: np.ndarray, pair_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of bits: [R, D] that some pairs use, and each pair's row among them: [P] of uint32."""
    if bits.shape[0] == 1:
        return bits, pair_rows
    used = np.zeros(bits.shape[0], bool)
    used[pair_rows] = True
    if used.all():
        return bits, pair_rows
    return bits[used], (np.cumsum(used, dtype=np.uint32) - 1)[pair_rows]


def join(parts: Sequence[mx.array], positions: Sequence[np.ndarray], pairs: int) -> mx.array:
    """Outputs in the order of the pairs.

    Args:
        parts: [p_i, D] each.
        positions: the places of each part's rows; together every place of 0..pairs-1 once.
    """
    y = parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
    place = positions[0] if len(positions) == 1 else np.concatenate(positions)
    counted = np.arange(pairs, dtype=np.uint32)
    if np.array_equal(place, counted):  # the router's order already
        return y
    order = np.empty_like(counted)
    order[place] = counted
    return y[mx.array(order)]


def same_outputs(mine: np.ndarray, theirs: np.ndarray, dtype: str) -> bool:
    """Whether two machines computed the same outputs [P, D], given as raw bits.

    To the bit in float32 (CPU); 16-bit floats within SAME_WITHIN of the largest value, since kernels may sum in another
    order on another device.
    """
    if dtype == "float32" or np.array_equal(mine, theirs):
        return np.array_equal(mine, theirs)
    if dtype == "float16":
        a, b = (bits.view(np.float16).astype(np.float32) for bits in (mine, theirs))
    else:
        a, b = (np.left_shift(bits.astype(np.uint32), 16).view(np.float32) for bits in (mine, theirs))
    return bool(np.abs(a - b).max() <= SAME_WITHIN * max(np.abs(a).max(), 1e-6))
