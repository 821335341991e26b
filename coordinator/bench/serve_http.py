"""`titan bench serve` over HTTP: a running coordinator at several requests at once, seen from a client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx

from titan.common.errors import ClusterError
from titan.coordinator.bench.serve import percentile

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class HttpFigures:
    """Streams of one concurrency. Rates count tokens between the first and the last event of the whole run."""

    concurrency: int
    requests: int
    tokens_per_s: float
    first_token_ms_p50: float
    first_token_ms_p95: float
    gap_ms_p50: float
    gap_ms_p95: float
    gap_ms_p99: float


async def bench_http(
    url: str, key: str | None, concurrencies: Sequence[int], tokens: int, rounds: int, prompt: str
) -> list[HttpFigures]:
    """Streamed completions of `tokens` tokens, `rounds` times as many as run together.

    Raises:
        ClusterError: an answer is an error.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=max(concurrencies))
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
        await _one(client, prompt, 4)  # warm up
        return [await _at(client, n, tokens, rounds, prompt) for n in concurrencies]


async def _at(client: httpx.AsyncClient, concurrency: int, tokens: int, rounds: int, prompt: str) -> HttpFigures:
    async def user(number: int) -> list[list[float]]:
        return [await _one(client, f"{prompt} {number} {i}", tokens) for i in range(rounds)]

    runs = [times for runs in await asyncio.gather(*(user(i) for i in range(concurrency))) for times in runs]
    events = sorted(at for times in runs for at in times[1:])
    first = [times[1] - times[0] for times in runs if len(times) > 1]
    gaps = [b - a for times in runs for a, b in pairwise(times[1:])]
    if not gaps:
        raise ClusterError("the answers are too short to measure", "ask for more tokens, or give another prompt")
    return HttpFigures(
        concurrency,
        len(runs),
        len(events) / (events[-1] - events[0]),
        *(1e3 * percentile(first, p) for p in (50, 95)),
        *(1e3 * percentile(gaps, p) for p in (50, 95, 99)),
    )


async def _one(client: httpx.AsyncClient, prompt: str, tokens: int) -> list[float]:
    """When the request was sent, and when each token came."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "return_token_ids": True}
    times = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ClusterError(f"{response.url} answers {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ClusterError(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    times.extend([time.perf_counter()] * len(choice.get("token_ids", ())))
    return times
