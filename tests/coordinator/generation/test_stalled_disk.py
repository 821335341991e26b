"""A disk that hangs under a serving engine: that request fails in time, others are answered, and it is used again."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fixtures.generation import DEADLINE_S, PROMPTS, wait_until
from fixtures.hanging_disk import HangingDisk
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.common.config.hosts import HostsConfig
from titan.common.errors import EngineFailed
from titan.common.registry import open_checkpoint
from titan.common.slots.buffers import slot_bytes
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.generation import Engine, GenerationRequest, Sampling, TextDelta
from titan.deploy import DEMO_MODEL

READ_S = 0.3


async def answer(engine: Engine, tokenizer: TokenizerWrapper, prompt: str) -> tuple[int, ...]:
    request = GenerationRequest(tuple(tokenizer.encode(prompt)), 8, sampling=Sampling(temperature=0))
    tokens: tuple[int, ...] = ()
    async with asyncio.timeout(DEADLINE_S):
        async for event in engine.submit(request):
            if isinstance(event, TextDelta):
                tokens += event.tokens
    return tokens


async def test_a_request_fails_the_engine_goes_on(tokenizer: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HangingDisk(monkeypatch)
    checkpoint = open_checkpoint(DEMO_MODEL)
    memory = 8 * sum(slot_bytes(spec, "float32") for spec in checkpoint.shape.layers)
    hosts = HostsConfig.model_validate(
        {"model": str(DEMO_MODEL), "coordinator": {"memory": memory}, "timeouts": {"read": f"{READ_S}s"}}
    )
    cluster = Cluster(hosts, checkpoint, None, ClusterOptions())
    engine = Engine(cluster.load)
    engine.start()
    try:
        wait_until(lambda: engine.status().state == "ready", "the model to load")
        expected = await answer(engine, tokenizer, PROMPTS[0])
        disk.hang(DEMO_MODEL)
        began_s = time.monotonic()
        with pytest.raises(EngineFailed, match=r"has not answered a read of .*model\.safetensors in 0\.3 s"):
            await answer(engine, tokenizer, PROMPTS[1])
        # One wait, in whatever layer it was: the layers after it do not wait again.
        assert READ_S <= time.monotonic() - began_s < 10 * READ_S
        with pytest.raises(EngineFailed, match="its disk does not answer"):
            await answer(engine, tokenizer, PROMPTS[1])
        assert engine.status().state == "ready"
        disk.come_back()
        wait_until(lambda: disk.waiting == 0, "the reads to end")
        assert await answer(engine, tokenizer, PROMPTS[0]) == expected
        assert sum(layer.table.lost for layer in cluster.layers.values()) == 0, "a slot has leaked"
    finally:
        disk.come_back()
        assert engine.stop(DEADLINE_S)
    wait_until(lambda: not any(t.name == "titan-reader" for t in threading.enumerate()), "the readers to end")
