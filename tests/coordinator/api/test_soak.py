"""Hundreds of requests, many at a time, cancelled and malformed at random: nothing is left behind.

Run: `.venv/bin/pytest tests/coordinator/api/test_soak.py`. docs/server.md has the figures of a long run.
"""

from __future__ import annotations

import gc
import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import mlx.core as mx
import psutil
from fixtures.api_server import RunningApi
from fixtures.generation import PROMPTS, ProbedEngine, wait_until

REQUESTS = 150
TOGETHER = 16
MALFORMED = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": "\xff"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
    json.dumps({"prompt": "x", "max_tokens": 10**9}).encode(),
    json.dumps({"prompt": "x" * 100_000}).encode(),
    b'{"messages": [{"role": "king", "content": 5}]}',
)


def test_nothing_is_left_behind() -> None:
    with ProbedEngine(queue_limit=64, prefill_step_tokens=32) as probed, RunningApi(probed) as api:
        expected = [api.http.post("/v1/completions", json=body(prompt)).json()["choices"] for prompt in PROMPTS]
        wait_until(api.idle, "the engine to be idle")
        gc.collect()
        before_bytes = probed.engine.run_between_steps(mx.get_active_memory).result(10)
        process = psutil.Process()
        before = (process.num_fds(), threading.active_count())
        with httpx.Client(base_url=api.url, timeout=60) as client, ThreadPoolExecutor(TOGETHER) as pool:
            outcomes = list(pool.map(lambda i: one(client, api, i, expected), range(REQUESTS)))
        assert set(outcomes) == {"whole", "streamed", "left", "refused"}
        wait_until(api.idle, "the engine to be idle")
        status = probed.engine.status()
        assert (status.state, status.restarts, status.kv_tokens, status.failed) == ("ready", 0, 0, 0)
        assert status.completed + status.cancelled >= REQUESTS // 2
        gc.collect()
        assert probed.engine.run_between_steps(mx.get_active_memory).result(10) == before_bytes
        wait_until(lambda: process.num_fds() <= before[0] + 2, "connections to close")
        wait_until(lambda: threading.active_count() <= before[1] + 8, "threads to end")  # asyncio keeps a small pool
        again = [api.http.post("/v1/completions", json=body(prompt)).json()["choices"] for prompt in PROMPTS]
        assert again == expected


def body(prompt: str, **values: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0} | values


def one(client: httpx.Client, api: RunningApi, number: int, expected: list[Any]) -> str:
    chance = random.Random(number)
    which = chance.randrange(len(PROMPTS))
    kind = chance.random()
    if kind < 0.25:
        response = client.post("/v1/completions", json=body(PROMPTS[which]))
        assert response.json()["choices"] == expected[which]
        return "whole"
    if kind < 0.5:
        text = ""
        with client.stream("POST", "/v1/completions", json=body(PROMPTS[which], stream=True)) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == expected[which][0]["text"]
        return "streamed"
    if kind < 0.8:
        leave(api, body(PROMPTS[which], max_tokens=500, stream=chance.random() < 0.5), chance)
        return "left"
    path = chance.choice(("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"))
    response = client.post(path, content=chance.choice(MALFORMED), headers={"Content-Type": "application/json"})
    assert 400 <= response.status_code < 500, response.text
    return "refused"


def leave(api: RunningApi, wanted: dict[str, Any], chance: random.Random) -> None:
    """Send a request, read some of the answer, and go."""
    data = json.dumps(wanted).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", api.server.port), timeout=60) as connection:
        connection.sendall(head + data[: len(data) if chance.random() < 0.8 else len(data) // 2])
        if wanted["stream"] and chance.random() < 0.7:
            connection.settimeout(2)
            try:
                connection.recv(chance.randrange(1, 4000))
            except TimeoutError:
                return
