"""Decode with too few slots against all-resident decode plus the stall nobody can avoid; variants against each other.

One process, one loaded model: for every token all-resident decode and then each variant takes its step, so that a busy
machine disturbs all of them alike. The tokens are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from titan.common.arrays import compute_dtype
from titan.common.cores import OneCore
from titan.common.registry import Checkpoint
from titan.coordinator.bench.ssd_routing import drawn_routing, reuse_of, simulated_misses
from titan.coordinator.bench.ssd_runs import ResidentRun, VariantRun
from titan.coordinator.bench.ssd_variant import LayerFigures, Variant, VariantFigures
from titan.coordinator.host.model import HostModel, load_host_model

__all__ = ["SsdBench"]

FIRST_TOKEN = 5
TEMPERATURE = 0.8
BLOCKS = 12
FEWEST_TOKENS = 4


class SsdBench:
    """Decodes up to `tokens` tokens with every variant after `warm` uncounted ones. All MLX work on the calling thread.

    Args:
        limit_s: a group of variants stops then, with as many tokens as were decoded (but at least four).
    """

    def __init__(self, checkpoint: Checkpoint, pack: Checkpoint, tokens: int, warm: int, limit_s: float) -> None:
        self.checkpoint, self.pack = checkpoint, pack
        self.tokens, self.warm, self.limit_s = tokens, warm, limit_s
        floats = {t.dtype for t in checkpoint.non_expert_tensors if t.dtype in ("F32", "F16", "BF16")}
        self.dtype = compute_dtype(floats)
        self.host: HostModel = load_host_model(checkpoint, self.dtype)

    def run(
        self, variants: Sequence[Variant], reuse: float | None, on_token: Callable[[int, int], None]
    ) -> list[VariantFigures]:
        """One group of variants, stepped in turns.

        Args:
            reuse: draw the experts with this reuse instead of asking the router.
            on_token: told how many tokens are done, and how many there will be at most.
        """
        shape = self.checkpoint.shape
        resident = ResidentRun(self.host, self.checkpoint, self.dtype)
        runs = [VariantRun(self.host, self.pack if v.packed else self.checkpoint, v, self.dtype) for v in variants]
        given = None
        if reuse is not None:
            total = max(1, self.warm) + self.tokens
            given = drawn_routing(total, len(shape.layers), shape.num_experts, shape.top_k, reuse)
        core = OneCore()  # as a coordinator does
        try:
            return _Group(self, resident, runs, given).decode(on_token)
        finally:
            core.release()
            self.host.unbind()
            for run in runs:
                run.close()


class _Group:
    """Variants that decode the same tokens side by side."""

    def __init__(
        self, bench: SsdBench, resident: ResidentRun, runs: Sequence[VariantRun], given: np.ndarray | None
    ) -> None:
        self.bench, self.resident, self.runs, self.given = bench, resident, runs, given
        self.ids: list[np.ndarray] = []
        self.seconds: list[list[float]] = []  # of resident and the runs, a row a counted token
        self.identical = [True] * len(runs)
        self._key = mx.random.key(0)

    def decode(self, on_token: Callable[[int, int], None]) -> list[VariantFigures]:
        bench, token = self.bench, FIRST_TOKEN
        uncounted = bench.warm
        if self.given is not None:
            uncounted = 1  # the first compiles kernels
            before = self.given[: max(0, bench.warm - 1)]
            self.ids = list(before)
            for run in self.runs:
                run.bring(before)
        counts = [run.counts() for run in self.runs]
        deadline = time.monotonic() + bench.limit_s
        for number in range(uncounted + bench.tokens):
            if number == uncounted:
                counts = [run.counts() for run in self.runs]
            if number >= uncounted + FEWEST_TOKENS and time.monotonic() > deadline:
                break
            token, seconds = self._step(token, number)
            if number >= uncounted:
                self.seconds.append(seconds)
            on_token(number + 1, uncounted + bench.tokens)
        spent = [run.counts() - before for run, before in zip(self.runs, counts, strict=True)]
        return [self._figures(number, counted) for number, counted in enumerate(spent)]

    def _step(self, token: int, number: int) -> tuple[int, list[float]]:
        """The next token, drawn from the resident run's logits, and each run's seconds."""
        everyone = [self.resident, *self.runs]
        for run in everyone:
            run.given = self.given[len(self.ids)] if self.given is not None else None
        logits, took = self.resident.step(token)
        self.ids.append(self.resident.routed())
        seconds = [took] + [0.0] * len(self.runs)
        best = _item(mx.argmax(logits))
        for turn in range(len(self.runs)):
            index = (turn + number) % len(self.runs)
            found, seconds[1 + index] = self.runs[index].step(token)
            self.identical[index] &= _item(mx.argmax(found)) == best
        self._key, key = mx.random.split(self._key)
        return _item(mx.random.categorical(logits / TEMPERATURE, key=key)), seconds

    def _figures(self, number: int, spent: np.ndarray) -> VariantFigures:
        run, shape = self.runs[number], self.bench.checkpoint.shape
        variant, tokens = run.variant, len(self.seconds)
        ids = np.stack(self.ids)
        seconds = np.array(self.seconds)
        own, ideal = (
            simulated_misses(ids, variant.slots, policy, shape.num_experts)[-tokens:]
            for policy in (variant.policy, "belady")
        )
        stalls = run.stalls(own)
        expected = _ratio(seconds[:, 1 + number], seconds[:, 0] + stalls)
        first = _ratio(seconds[:, 1 + number], seconds[:, 1])
        each = spent / tokens
        hits, misses, loads, prefetched, useful, late, stall = each.sum(axis=0)
        return VariantFigures(
            variant=variant,
            name=variant.name,
            tokens=tokens,
            reuse=reuse_of(ids),
            token_ms=1e3 * float(np.median(seconds[:, 1 + number])),
            resident_ms=1e3 * float(np.median(seconds[:, 0])),
            unavoidable_ms=1e3 * float(stalls.mean()),
            over_expected=expected[0],
            over_expected_error=expected[1],
            over_first=first[0],
            over_first_error=first[1],
            hit_rate=hits / (hits + misses),
            simulated_hit_rate=1 - float(own.mean()) / shape.top_k,
            belady_hit_rate=1 - float(ideal.mean()) / shape.top_k,
            loads=loads,
            mbytes=loads * shape.layers[0].expert_bytes / 1e6,
            prefetched=prefetched,
            useful=useful,
            late=late,
            stall_ms=1e3 * stall,
            fetch_ms=1e3 * run.fetch_s,
            identical=self.identical[number],
            layers=[
                LayerFigures(index, e[0] / (e[0] + e[1]), e[2], e[5], 1e3 * e[6])
                for index, e in zip(run.layers, each, strict=True)
            ],
        )


def _ratio(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """(median over blocks of neighbouring tokens of their sums' ratio, its standard error)."""
    blocks = min(BLOCKS, len(above))
    parts = np.array_split(np.arange(len(above)), blocks)
    ratios = np.array([above[part].sum() / below[part].sum() for part in parts])
    return float(np.median(ratios)), float(1.25 * ratios.std() / np.sqrt(blocks))


def _item(token: mx.array) -> int:
    return int(token.item())  # type: ignore[arg-type]  # an integer array
