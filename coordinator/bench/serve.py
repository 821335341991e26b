"""`titan bench serve`: tokens/s at several requests at once, first token and gaps, beside mlx-lm's batch generator.

Engine and reference run in one process, interleaved, on the same prompts, so that a noisy machine disturbs them alike.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model

from titan.common.registry import open_checkpoint
from titan.coordinator.bench.local import load_alone
from titan.coordinator.generation import Engine, GenerationRequest, Handle, LoadedModel, Sampling, TextDelta
from titan.coordinator.generation.room import GROWTH_TOKENS

PROMPT_TOKENS = 32
READY_S = 600.0
GREEDY = Sampling(temperature=0)


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """One batch size. Rates are medians over the repeats; the ratio is the median of the ratios within each.

    `step_ratio` compares the median times between two tokens of all repeats instead, a busy machine disturbs it less.
    """

    batch: int
    titan_tokens_per_s: float
    mlx_lm_tokens_per_s: float
    ratio: float
    step_ratio: float
    identical: bool
    first_token_ms_p50: float
    first_token_ms_p95: float
    gap_ms_p50: float
    gap_ms_p99: float


@dataclass(frozen=True, slots=True)
class ServeFigures:
    model: str
    tokens: int
    repeats: int
    batches: list[BatchFigures] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """What one run of a batch gave: from the last first token to the first end every sequence decodes."""

    tokens: list[list[int]]
    tokens_per_s: float
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def bench_engine(
    path: Path, batches: Sequence[int], tokens: int, repeats: int, on_repeat: Callable[[str], None]
) -> ServeFigures:
    """Titan's engine against mlx-lm's BatchGenerator, all experts at home, the same greedy prompts."""
    checkpoint = open_checkpoint(path)
    figures = ServeFigures(str(path), tokens, repeats)

    def load() -> LoadedModel:
        cluster, loaded = load_alone(checkpoint)
        reference, _ = load_model(checkpoint.path, lazy=True, model_config=dict(checkpoint.config_defaults))
        if cluster.dtype == "float32":
            reference.set_dtype(mx.float32)
        mx.eval(reference.parameters())
        references.append(reference)
        return replace(loaded, kv_tokens=max(batches) * (PROMPT_TOKENS + tokens + GROWTH_TOKENS))

    references: list[Callable[..., mx.array]] = []
    engine = Engine(load, max_sequences=max(batches), queue_limit=max(batches))
    engine.start()
    try:
        _wait_ready(engine)
        for batch in batches:
            figures.batches.append(_compare(engine, references, batch, tokens, repeats, on_repeat))
    finally:
        engine.run_between_steps(references.clear).exception(READY_S)
        engine.stop(READY_S)
    return figures


def _compare(
    engine: Engine,
    references: list[Callable[..., mx.array]],
    batch: int,
    tokens: int,
    repeats: int,
    on_repeat: Callable[[str], None],
) -> BatchFigures:
    prompts = [[(7 * i + j) % 500 + 1 for j in range(PROMPT_TOKENS)] for i in range(batch)]

    def by_titan() -> _Run:
        return asyncio.run(_by_titan(engine, prompts, tokens))

    def by_mlx_lm() -> _Run:
        return engine.run_between_steps(lambda: _by_mlx_lm(references[0], prompts, tokens)).result(READY_S)

    variants = (by_titan, by_mlx_lm)
    expected = [variant().tokens for variant in variants]  # warm up, and compare
    runs: list[tuple[_Run, _Run]] = []
    for repeat in range(repeats):
        order = variants if repeat % 2 == 0 else variants[::-1]
        done = {variant: variant() for variant in order}
        runs.append((done[by_titan], done[by_mlx_lm]))
        on_repeat(f"batch {batch}: run {repeat + 1} of {repeats}")
    first = [value for run, _ in runs for value in run.first_s]
    gaps = [value for run, _ in runs for value in run.gaps_s]
    return BatchFigures(
        batch,
        statistics.median(run.tokens_per_s for run, _ in runs),
        statistics.median(run.tokens_per_s for _, run in runs),
        statistics.median(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in runs),
        percentile([gap for _, run in runs for gap in run.gaps_s], 50) / percentile(gaps, 50),
        expected[0] == expected[1],
        1e3 * percentile(first, 50),
        1e3 * percentile(first, 95),
        1e3 * percentile(gaps, 50),
        1e3 * percentile(gaps, 99),
    )


async def _by_titan(engine: Engine, prompts: list[list[int]], tokens: int) -> _Run:
    started = time.perf_counter()
    handles = engine.submit_all(
        [GenerationRequest(tuple(prompt), tokens, GREEDY, ignore_end=True) for prompt in prompts]
    )
    return _summed(started, await asyncio.gather(*(_follow(handle) for handle in handles)))


async def _follow(handle: Handle) -> tuple[list[int], list[float]]:
    """Tokens, and when each was there."""
    tokens: list[int] = []
    times: list[float] = []
    async for event in handle:
        if isinstance(event, TextDelta):
            tokens.extend(event.tokens)
            times.extend([time.perf_counter()] * len(event.tokens))
    return tokens, times


def _by_mlx_lm(model: Callable[..., mx.array], prompts: list[list[int]], tokens: int) -> _Run:
    generator = BatchGenerator(model, max_tokens=tokens, completion_batch_size=len(prompts))  # type: ignore[arg-type]
    started = time.perf_counter()
    uids = generator.insert(prompts, max_tokens=[tokens] * len(prompts))
    found: dict[int, tuple[list[int], list[float]]] = {uid: ([], []) for uid in uids}
    while any(len(times) < tokens for _, times in found.values()):
        for response in generator.next_generated():
            found[response.uid][0].append(response.token)
            found[response.uid][1].append(time.perf_counter())
    generator.close()
    return _summed(started, [found[uid] for uid in uids])


def _summed(started: float, followed: Sequence[tuple[list[int], list[float]]]) -> _Run:
    begins = max(times[0] for _, times in followed)
    ends = min(times[-1] for _, times in followed)
    between = sum(begins < at <= ends for _, times in followed for at in times)
    return _Run(
        [tokens for tokens, _ in followed],
        between / (ends - begins),
        [times[0] - started for _, times in followed],
        [b - a for _, times in followed for a, b in pairwise(times)],
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * percent) // 100) - 1))]


def _wait_ready(engine: Engine) -> None:
    deadline = time.monotonic() + READY_S
    while engine.status().state == "loading" and time.monotonic() < deadline:
        time.sleep(0.02)
    engine.served()
