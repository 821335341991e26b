"""What one run learned, the next one knows: for the same model only, and never more than it may weigh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from fixtures.checkpoints import make_checkpoint

from titan.common.experts import ExpertLayer
from titan.common.prediction import Routing, Transition
from titan.common.prefetch.learned import MAX_STEPS, recall, remember
from titan.common.prefetch.prefetcher import Prefetcher
from titan.common.registry import open_checkpoint
from titan.common.slots import Forecast, make_policy
from titan.common.slots.buffers import LayerBuffers
from titan.common.slots.forecast import HORIZON
from titan.common.store import ExpertStore


def test_experience_survives_a_restart(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model", hidden=64, width=64))
    store = ExpertStore(checkpoint)

    def start(policy: str = "forecast") -> tuple[list[ExpertLayer], Prefetcher, Transition]:
        layers = [
            ExpertLayer(LayerBuffers(spec, 4, "float32"), store.read_expert, make_policy(policy, 8))
            for spec in checkpoint.shape.layers
        ]
        transition = Transition(2, 8, 1)
        return layers, Prefetcher(layers, [transition], 2), transition

    path, fingerprint = tmp_path / "state" / "learned.npz", checkpoint.shape.fingerprint
    layers, prefetcher, transition = start()
    assert not recall(path, fingerprint, layers, prefetcher)
    for _ in range(HORIZON + 1):
        layers[0].table.look_up([1, 2])
        transition.observe(0, Routing([1, 2]))
        transition.observe(1, Routing([3, 4]))
    assert remember(path, fingerprint, layers, prefetcher)

    layers, prefetcher, transition = start()
    assert not recall(path, "0" * 64, layers, prefetcher)
    assert recall(path, fingerprint, layers, prefetcher)
    policy = layers[0].table.policy
    assert isinstance(policy, Forecast)
    assert policy.foresight.steps[0] == HORIZON + 1
    assert policy.foresight.weights.any()
    transition.observe(0, Routing([1, 2]))
    assert set(transition.rank(1)[:2].tolist()) == {3, 4}

    transition.steps[:] = 3 * MAX_STEPS
    transition.uses[:] = 3
    remember(path, fingerprint, layers, prefetcher)
    layers, prefetcher, transition = start()
    assert recall(path, fingerprint, layers, prefetcher)
    assert transition.steps.max() == MAX_STEPS
    np.testing.assert_allclose(transition.uses, 1)
    assert not remember(path, fingerprint, start("lru")[0], None)
    store.close()
