"""Wire precision `reduced` over worker processes: mlx-lm's logits within float32's rounding, also after failures.

Run: .venv/bin/pytest tests/cluster/test_reduced.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from fixtures.plans import all_remote, make_plan, split
from fixtures.reference import load_reference, logits_of, reference_logits, reference_tokens, titan_tokens

from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.deploy import DEMO_MODEL

NODES = ("coordinator", "worker-1", "worker-2")
REDUCED = {"precision": "reduced", "timeouts": {"execute": "4s"}}
PROMPT = np.random.default_rng(1).integers(3, 2000, 24).tolist()
TOKENS = 24
BAD_WORKER = str(Path(__file__).parents[1] / "fixtures" / "bad_worker.py")


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    return load_reference(DEMO_MODEL)


def loaded(loopback: LoopbackCluster, holder: object) -> Iterator[Cluster]:
    plan = make_plan(loopback.checkpoint, NODES, holder)  # type: ignore[arg-type]
    cluster = loopback.coordinator(ClusterOptions(plan=plan))
    yield cluster
    cluster.close()


@pytest.mark.parametrize("transport", ["lane", "grpc"])
def test_logits_are_mlx_lms_within_float32s_rounding(reference: nn.Module, transport: str) -> None:
    with LoopbackCluster(DEMO_MODEL, settings=REDUCED | {"transport": transport, "verify": "100%"}) as loopback:
        for cluster in loaded(loopback, split):
            model = cluster.load()
            assert titan_tokens(model, PROMPT, TOKENS) == reference_tokens(reference, PROMPT, TOKENS)
            batch = [np.random.default_rng(seed).integers(3, 2000, 70).tolist() for seed in (2, 3, 4)]
            found = logits_of(model.model, model.make_cache(), batch, steps=3)
            for want, have in zip(reference_logits(reference, batch, steps=3), found, strict=True):
                np.testing.assert_allclose(have, want, atol=1e-4 * np.abs(want).max())
            assert cluster.dispatcher is not None
            done = cluster.dispatcher.executed
            assert done.verified > 50
            assert done.fallbacks == 0, "an honest worker's sums were not this machine's"


def test_a_killed_worker_changes_no_token(reference: nn.Module) -> None:
    with LoopbackCluster(DEMO_MODEL, settings=REDUCED) as loopback:
        for cluster in loaded(loopback, all_remote):
            model = cluster.load()
            expected = reference_tokens(reference, PROMPT, TOKENS)
            assert titan_tokens(model, PROMPT, TOKENS) == expected
            loopback.workers[0].kill()
            assert titan_tokens(model, PROMPT, TOKENS) == expected
            assert cluster.dispatcher is not None
            assert cluster.dispatcher.executed.ssd > 0


def test_a_worker_that_sums_wrongly_is_found(reference: nn.Module) -> None:
    settings = REDUCED | {"verify": "100%"}
    with LoopbackCluster(
        DEMO_MODEL, settings=settings, program=(sys.executable, BAD_WORKER, "wrong", "40")
    ) as loopback:
        for cluster in loaded(loopback, all_remote):
            assert titan_tokens(cluster.load(), PROMPT, TOKENS) == reference_tokens(reference, PROMPT, TOKENS)
            assert cluster.dispatcher is not None
            assert cluster.dispatcher.executed.fallbacks > 0
