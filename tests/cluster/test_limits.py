"""Very long prompts and many requests pass through the limits of the wire and of the server, with the same bits.

Run: .venv/bin/pytest tests/cluster/test_limits.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import mlx.core as mx
import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.plans import all_remote, make_plan
from fixtures.processes import CoordinatorProcess, write_hosts
from fixtures.reference import load_reference, reference_tokens

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
ANSWER = 8
LONG_S = 120.0


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


def test_a_prompt_of_32k_tokens_and_seven_more_requests_at_once(tmp_path: Path) -> None:
    """Over HTTP; eight sequences of very different lengths decode together, and each gets mlx-lm's tokens.

    One layer and one head: attention over 32k tokens is most of what this costs, here and in mlx-lm's own run.
    """
    shape = {"family": "qwen3_moe", "layers": 1, "experts": 8, "hidden": 64, "width": 64, "heads": 1, "head_dim": 16}
    path = make_checkpoint(tmp_path / "model", **shape, max_position_embeddings=9 * ROWS)
    rng = np.random.default_rng(0)
    prompts = [[int(token) for token in rng.integers(5, 2000, length)] for length in (ROWS, *range(40, 110, 10))]
    reference = load_reference(path)
    expected = [reference_tokens(reference, prompt, ANSWER) for prompt in prompts]
    del reference

    with LoopbackCluster(path, home_bytes=1 << 20, settings={"timeouts": {"execute": "5s"}}) as loopback:
        hosts = write_hosts(loopback.folder / "hosts.yaml", loopback.hosts)
        plan = tmp_path / "plan.json"
        plan.write_text(make_plan(loopback.checkpoint, NODES, all_remote).to_json())
        options = ("--plan", str(plan), "--prompt-cache", "0B", "--context", str(9 * ROWS))
        with CoordinatorProcess(hosts, *options) as coordinator, httpx.Client(timeout=LONG_S) as client:
            url = coordinator.wait_until_ready()
            body = {"model": "default", "max_tokens": ANSWER, "temperature": 0, "return_token_ids": True}

            def ask(prompt: list[int]) -> list[int]:
                reply = client.post(f"{url}/completions", json=body | {"prompt": prompt})
                assert reply.status_code == 200, reply.text
                return reply.json()["choices"][0]["token_ids"]

            with ThreadPoolExecutor(len(prompts)) as pool:
                assert list(pool.map(ask, prompts)) == expected
            state = client.get(f"{url}/titan/cluster").json()
            assert state["executed"]["fallbacks"] == 0
            assert sum(state["executed"]["remote"].values()) >= ROWS * 2
            assert (state["engine"]["completed"], state["engine"]["kv_tokens"]) == (len(prompts), 0)
