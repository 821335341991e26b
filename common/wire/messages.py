"""Execute requests and replies as values, independent of the transport that carries them.

Activations are numpy arrays of raw bits (float32, or uint16 for 16-bit floats). Named tuples, because one is made at
every step of every layer. Knows neither gRPC nor MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 32 << 20  # a peer's message beyond this is refused before it is parsed
SPLIT_BYTES = 8 << 20  # a coordinator splits a layer's request so that neither direction is larger
PART_BYTES = 1 << 20  # an expert is pushed in parts of this size
MAX_ROWS = 1 << 16
MAX_PAIRS = 1 << 20
MAX_DEADLINE_S = 3600.0
MAX_HINTED = 64  # experts in one hint


class ExecuteCall(NamedTuple):
    """One request: some (row, expert) pairs of one layer.

    Args:
        request_id: unique in the session.
        layer: the model's layer number.
        activations: [R, D] raw bits.
        pair_rows: [P] uint32, each < R.
        pair_experts: [P] uint32.
        sort: whether mlx-lm would sort the whole layer's pairs.
        deadline_s: seconds after which nobody waits for the answer any more; 0 for no limit of the sender's.
    """

    request_id: int
    layer: int
    activations: np.ndarray
    pair_rows: np.ndarray
    pair_experts: np.ndarray
    sort: bool
    deadline_s: float

    @property
    def deadline_us(self) -> int:
        return min(int(self.deadline_s * 1e6), 0xFFFFFFFF)


class ExecuteResult(NamedTuple):
    """One reply: outputs [P, D] raw bits in the order of the pairs, and where the worker's time went.

    `queue_us` is the wait for the MLX thread, `load_us` the reading of experts that were not in memory, `compute_us`
    the rest of the execution.
    """

    request_id: int
    outputs: np.ndarray
    queue_us: int
    compute_us: int
    load_us: int = 0


class Hint(NamedTuple):
    """Experts that a layer to come will probably ask a worker for; nobody waits for an answer.

    Args:
        layer: the model's layer number.
        experts: likeliest first, at most MAX_HINTED; none of them is to be evicted for another.
        reads: at most so many of those that are not in memory are worth reading.
    """

    layer: int
    experts: Sequence[int]
    reads: int


def split_pairs(pair_count: int, hidden_size: int, itemsize: int, split_bytes: int = SPLIT_BYTES) -> list[slice]:
    """Slices of a layer's pairs such that no reply (and no request with distinct rows) exceeds `split_bytes`."""
    width = max(1, split_bytes // (hidden_size * itemsize + 8))
    return [slice(i, min(i + width, pair_count)) for i in range(0, pair_count, width)]
