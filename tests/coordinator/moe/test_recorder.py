"""What is recorded is what the router chose, and recording changes no token.

Run: .venv/bin/pytest tests/coordinator/moe/test_recorder.py
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from fixtures.plans import all_local, all_ssd, make_plan
from fixtures.reference import load_reference, reference_tokens, titan_tokens

from titan.common.config.hosts import HostsConfig
from titan.common.errors import StoreError
from titan.common.registry import open_checkpoint
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.deploy import DEMO_MODEL
from titan.placement.trace_read import read_trace

PROMPT = list(range(30, 42))


@pytest.mark.parametrize("holder", [all_local, all_ssd])
def test_the_trace_is_the_routers_choice(tmp_path: Path, holder: object) -> None:
    checkpoint = open_checkpoint(DEMO_MODEL)
    plan = make_plan(checkpoint, ("coordinator",), holder)  # type: ignore[arg-type]
    file = tmp_path / "demo.trace"
    cluster = Cluster(HostsConfig(model=DEMO_MODEL), checkpoint, None, ClusterOptions(plan=plan, trace=file))
    reference = load_reference(DEMO_MODEL)
    try:
        tokens = titan_tokens(cluster.load(), PROMPT, 10)
        assert tokens == reference_tokens(reference, PROMPT, 10)
    finally:
        cluster.close()

    # The reference's own routing of the same tokens, layer by layer.
    chosen: list[list[np.ndarray]] = [[] for _ in range(8)]
    shares: list[list[np.ndarray]] = [[] for _ in range(8)]
    for place, layer in enumerate(reference["model"]["layers"]):
        gate = layer.mlp.gate

        def watched(x: mx.array, gate: object = gate, place: int = place) -> mx.array:
            logits = gate(x)  # type: ignore[operator]
            weights = mx.softmax(logits, axis=1, precise=True)
            indices = mx.argpartition(-weights, kth=3, axis=-1)[..., :4]
            chosen[place].append(np.array(indices))
            shares[place].append(np.array(mx.take_along_axis(weights, indices, axis=-1)))
            return logits

        layer.mlp.gate = watched
    reference_tokens(reference, PROMPT, 10)

    trace = read_trace(file)
    assert trace.header.fingerprint == checkpoint.shape.fingerprint
    rows = len(trace.step)
    # 11 prompt tokens in one prefill pass, then one row a step; the reference runs one discarded step more.
    assert rows == 11 + 10
    for place in range(8):
        expected = np.concatenate(chosen[place])[:rows]
        np.testing.assert_array_equal(trace.ids[:, place], expected)
        assert trace.probabilities is not None
        np.testing.assert_allclose(trace.probabilities[:, place], np.concatenate(shares[place])[:rows], atol=1 / 255)


def test_a_trace_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(DEMO_MODEL)
    plan = make_plan(checkpoint, ("coordinator",), all_local)
    options = ClusterOptions(plan=plan, trace=tmp_path / "none" / "file.trace")
    cluster = Cluster(HostsConfig(model=DEMO_MODEL), checkpoint, None, options)
    try:
        with pytest.raises(StoreError, match=r"file\.trace"):
            cluster.load()
    finally:
        cluster.close()
