"""Comparing what two machines computed.

Run: .venv/bin/pytest tests/coordinator/moe/test_pairs.py
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from titan.common.arrays import COMPUTE_DTYPES, raw_bits
from titan.coordinator.moe.pairs import same_outputs


def test_float32_is_compared_to_the_bit() -> None:
    mine = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    assert same_outputs(mine, mine.copy(), "float32")
    theirs = mine.copy()
    theirs[1, 2] = np.nextafter(theirs[1, 2], np.float32(9))
    assert not same_outputs(mine, theirs, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_floats_are_compared_within_what_kernels_differ_by(dtype: str) -> None:
    kind = COMPUTE_DTYPES[dtype][1]
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    mine = np.array(raw_bits(mx.array(values).astype(kind)))
    near = np.array(raw_bits(mx.array(values * 1.003).astype(kind)))
    far = np.array(raw_bits(mx.array(values * -0.8).astype(kind)))
    assert same_outputs(mine, near, dtype)
    assert not same_outputs(mine, far, dtype)
