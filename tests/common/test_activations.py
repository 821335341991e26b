"""Activations between up, gate and down: the bits of mlx-lm's, in every dtype that Titan computes in."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU

from titan.common.activations import ACTIVATION
from titan.common.registry.shape import ACTIVATIONS

MLX_LM = {"silu": SwiGLU(), "gpt_oss": SwigluOAI()}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_bits_are_mlx_lms(name: str, dtype: mx.Dtype) -> None:
    random = np.random.default_rng(7)
    up, gate = (mx.array(random.normal(0, 6, (64, 3, 1, 96)).astype(np.float32)).astype(dtype) for _ in range(2))
    ours, theirs = ACTIVATION[name](up, gate), MLX_LM[name](up, gate)
    assert ours.dtype == theirs.dtype == dtype
    np.testing.assert_array_equal(np.array(ours.astype(mx.float32)), np.array(theirs.astype(mx.float32)))


def test_a_worker_and_titan_start_without_mlx_lm() -> None:
    """It takes longer to import than all the rest together, and only the coordinator's model needs it."""
    code = "import sys, titan.worker.main, titan.coordinator.main, titan.cli; print({"
    code += "'mlx_lm', 'transformers'} & set(sys.modules) or [])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
