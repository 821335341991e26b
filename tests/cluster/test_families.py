"""Every family of the table computes what mlx-lm computes, bit for bit, with experts split over worker processes.

OLMoE and Qwen3-MoE have their own, longer file. Run: .venv/bin/pytest tests/cluster/test_families.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.plans import make_plan, split
from fixtures.reference import load_reference, logits_of, reference_logits, reference_tokens, titan_tokens

from titan.coordinator.cluster import ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.generation.batch import Batch, Row
from titan.coordinator.generation.prefill import Prefill
from titan.coordinator.generation.request import Sampling
from titan.coordinator.generation.sampling import make_sampler
from titan.placement.trace_read import read_trace

NODES = ("coordinator", "worker-1", "worker-2")
PATIENT = {"timeouts": {"execute": "4s"}}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"kv_heads": 1, "experts": 10},
    "gpt_oss": {"experts": 16, "top_k": 4, "layers": 4},
    "minimax_m2": {"experts": 16, "top_k": 4, "heads": 4},
    "glm4_moe": {"experts": 16, "top_k": 4, "layers": 4, "dtype": "float16"},
    "deepseek_v3": {"experts": 16, "top_k": 4, "layers": 4},
    "kimi_k2": {"experts": 16, "top_k": 4, "n_group": 1, "q_lora_rank": None, "bits": 8},
}


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 2000, length).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_over_two_workers(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", family=family, width=64, tie=False, **{"layers": 3, **FAMILIES[family]})
    reference = load_reference(path)
    with LoopbackCluster(path, settings=PATIENT) as loopback:
        plan = make_plan(loopback.checkpoint, NODES, split)
        file = tmp_path / "routing.trace"
        cluster = loopback.coordinator(ClusterOptions(plan=plan, trace=file))
        try:
            loaded = cluster.load()
            dispatcher = cluster.dispatcher
            assert dispatcher is not None

            prompt = prompt_of(24, seed=1)
            tokens = titan_tokens(loaded, prompt, 16)
            assert tokens == reference_tokens(reference, prompt, 16)
            assert len(set(tokens)) > 3, "the checkpoint repeats itself: the comparison would see little"

            batch = [prompt_of(70, seed) for seed in (2, 3, 4)]
            expected = reference_logits(reference, batch, steps=2)
            found = logits_of(loaded.model, loaded.make_cache(), batch, steps=2)
            for want, have in zip(expected, found, strict=True):
                np.testing.assert_array_equal(have, want)

            # Of different lengths, decoding together: each as it is alone.
            prompts = [prompt_of(length, seed=length) for length in (5, 40, 19)]
            rows: Batch[Row] = Batch(loaded.model)
            for prompt in prompts:
                prefill = Prefill(loaded.model, prompt, loaded.make_cache(), 64, None)
                while not prefill.complete:
                    prefill.advance()
                rows.join(Row(prompt[-1], 8, make_sampler(Sampling(temperature=0)), greedy=True), prefill.cache)
            together = [[step.token for step in rows.step(lookahead=lambda: True)] for _ in range(8)]
            alone = [reference_tokens(reference, prompt, 8) for prompt in prompts]
            assert [list(tokens) for tokens in zip(*together, strict=True)] == alone

            executed = dispatcher.executed
            assert executed.fallbacks == 0
            assert executed.local > 0
            assert executed.ssd > 0
            assert set(executed.remote) == {"worker-1", "worker-2"}
        finally:
            cluster.close()
    trace = read_trace(file)
    assert trace.probabilities is not None
    assert len(trace.step) > 16
