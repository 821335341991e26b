"""A very long prompt's layer passes through the limits of the wire: split, executed on workers, joined, the same bits.

Run: .venv/bin/pytest tests/cluster/test_limits.py
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from fixtures.plans import all_remote, make_plan

from titan.common.execution import apply_rows
from titan.common.experts import ExpertLayer
from titan.common.slots.buffers import LayerBuffers
from titan.common.wire.messages import split_pairs
from titan.coordinator.cluster import ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.deploy import DEMO_MODEL

NODES = ("coordinator", "worker-1", "worker-2")
ROWS = 32_768
LAYER = 3


@pytest.mark.parametrize("transport", ["lane", "grpc"])
def test_a_layer_of_32k_rows(transport: str) -> None:
    with LoopbackCluster(DEMO_MODEL, settings={"transport": transport}) as loopback:
        plan = make_plan(loopback.checkpoint, NODES, all_remote)
        cluster = loopback.coordinator(ClusterOptions(plan=plan))
        try:
            cluster.load()
            dispatcher = cluster.dispatcher
            assert dispatcher is not None
            rng = np.random.default_rng(0)
            x = mx.array(rng.standard_normal((1, ROWS, 128)).astype(np.float32))
            chosen = np.argsort(rng.random((ROWS, 32)), axis=1)[:, :4].astype(np.uint32)
            indices = mx.array(chosen)[None]

            there = np.array(dispatcher.execute(LAYER, x, indices))
            assert dispatcher.executed.fallbacks == 0
            assert sum(dispatcher.executed.remote.values()) == ROWS * 4
            assert len(split_pairs(ROWS * 2, 128, 4)) > 1, "the request was meant to be split"

            spec = loopback.checkpoint.shape.layer(LAYER)
            local = ExpertLayer(LayerBuffers(spec, 32, "float32"), cluster.store.read_expert)
            local.pin_all(32)
            here = np.array(apply_rows(local.buffers, x, indices))
            np.testing.assert_array_equal(there, here)
        finally:
            cluster.close()
