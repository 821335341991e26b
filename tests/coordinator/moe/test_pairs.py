"""Comparing what two machines computed.

Run: .venv/bin/pytest tests/coordinator/moe/test_pairs.py
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from titan.common.arrays import raw_bits
from titan.coordinator.moe.pairs import same_outputs


def test_float32_is_compared_to_the_bit() -> None:
    mine = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    assert same_outputs(mine, mine.copy())
    theirs = mine.copy()
    theirs[1, 2] = np.nextafter(theirs[1, 2], np.float32(9))
    assert not same_outputs(mine, theirs)


def test_bfloat16_is_compared_within_what_kernels_differ_by() -> None:
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    mine = np.array(raw_bits(mx.array(values).astype(mx.bfloat16)))
    near = np.array(raw_bits(mx.array(values * 1.003).astype(mx.bfloat16)))
    far = np.array(raw_bits(mx.array(values * 1.2).astype(mx.bfloat16)))
    assert same_outputs(mine, near)
    assert not same_outputs(mine, far)
