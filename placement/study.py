"""What `titan simulate` finds in a trace: hit rates, prefetching, a plan's replay. Knows values and their tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from titan.common.units import format_seconds
from titan.placement.plan import Plan
from titan.placement.prefetching import PrefetchRun, oracle, previous_row, run_prefetch, transition
from titan.placement.problem import Problem
from titan.placement.replay import PlanRun, check_same_model, replay_plan
from titan.placement.simulate import POLICIES, run_table
from titan.placement.trace import Trace

WINDOWS = (4, 16, 64)  # rows


@dataclass(frozen=True, slots=True)
class Study:
    """Results, ready for JSON. Hit rates by capacity then policy; prefetch by predictor then depth.

    Args:
        reuse: share of a row's experts that the row before selected too; `reuse_by_chance` if rows were independent.
        together: share of the rows that select both experts of the most frequent pair of a layer, mean over layers;
            `together_by_chance` if the two were independent.
        working_set: distinct experts of a layer by number of consecutive rows.
    """

    rows: int
    reuse: float
    reuse_by_chance: float
    together: float
    together_by_chance: float
    working_set: dict[str, float]
    hottest_share: float
    hit_rates: dict[str, dict[str, float]]
    prefetch: dict[str, dict[str, PrefetchRun]]
    prefetch_capacity: int
    replay: PlanRun | None = None
    predicted_step_s: float | None = None

    @staticmethod
    def of(
        trace: Trace,
        *,
        capacities: tuple[int, ...],
        depths: tuple[int, ...],
        fetch_s: float,
        layer_s: float,
        readers: int,
        plan: Plan | None = None,
    ) -> Study:
        """Replay everything.

        Raises:
            PlanError: the plan is of another model than the trace.
        """
        if plan is not None:
            check_same_model(plan, trace)
        top_k, experts = trace.header.top_k, trace.header.num_experts
        sizes = capacities or tuple(sorted({top_k, *(experts // d for d in (8, 4, 2) if experts // d > top_k)}))
        steps = [trace.ids[:, i].tolist() for i in range(trace.ids.shape[1])]
        hits = {
            str(c): {p: float(np.mean([run_table(s, c, p).hit_rate for s in steps])) for p in POLICIES} for c in sizes
        }
        table = sizes[len(sizes) // 2]
        prefetch: dict[str, dict[str, PrefetchRun]] = {}
        for name in ("previous row", "transition", "oracle"):
            runs = prefetch.setdefault(name, {})
            for depth in depths:
                guess = {"previous row": previous_row(trace), "oracle": oracle(trace)}.get(name)
                runs[str(depth)] = run_prefetch(
                    trace,
                    table,
                    guess or transition(trace, depth, min(experts, 2 * top_k)),
                    depth=depth,
                    fetch_s=fetch_s,
                    readers=readers,
                    layer_s=layer_s,
                )
        seen = trace.frequencies()
        frequencies = np.sort(seen, axis=1)[:, ::-1]
        together, by_chance = _most_together(trace, seen)
        return Study(
            rows=len(trace.ids),
            reuse=float(trace.reuse().mean()),
            reuse_by_chance=float((seen**2).sum(axis=1).mean() / top_k),
            together=together,
            together_by_chance=by_chance,
            working_set={str(w): float(trace.working_set(w).mean()) for w in WINDOWS if w <= len(trace.ids)},
            hottest_share=float(frequencies[:, : max(1, experts // 10)].sum(axis=1).mean() / top_k),
            hit_rates=hits,
            prefetch=prefetch,
            prefetch_capacity=table,
            replay=None if plan is None else replay_plan(plan, problem_of(plan), trace),
            predicted_step_s=None if plan is None or plan.predicted is None else plan.predicted.step_s,
        )


def _most_together(trace: Trace, frequencies: NDArray[np.float64]) -> tuple[float, float]:
    """See `Study.together`."""
    found = []
    for layer, row in enumerate(frequencies):
        pairs = np.triu(trace.coactivation(layer), 1)
        a, b = np.unravel_index(int(np.argmax(pairs)), pairs.shape)
        found.append((pairs[a, b], row[a] * row[b]))
    together, by_chance = np.mean(found, axis=0).tolist()
    return together, by_chance


def problem_of(plan: Plan) -> Problem:
    """The problem a plan's prediction stands for, as far as the plan tells: its fixed times spread over the layers."""
    count, predicted = len(plan.layers), plan.predicted
    split = sum(not plan.is_whole(i) for i in range(count))
    return Problem(
        fingerprint=plan.fingerprint,
        layers=plan.layers,
        expert_bytes=plan.expert_bytes,
        num_experts=plan.num_experts,
        top_k=plan.top_k,
        attention_s=((predicted.attention_s / count) if predicted else 0.0,) * count,
        nodes=plan.nodes,
        sync_s=predicted.sync_s / split if predicted and split else 0.0,
    )


def study_tables(study: Study) -> list[Table]:
    """The results as tables for a terminal."""
    routing = Table(title=f"what {study.rows} rows say of the routing", title_justify="left", show_header=False)
    routing.add_row("choices that go to the most frequent tenth of the experts", f"{study.hottest_share:.0%}")
    routing.add_row(
        "experts of a row that the row before selected", f"{study.reuse:.0%} (by chance {study.reuse_by_chance:.0%})"
    )
    routing.add_row(
        "rows that select both of the most frequent pair",
        f"{study.together:.0%} (by chance {study.together_by_chance:.0%})",
    )
    for rows, size in study.working_set.items():
        routing.add_row(f"distinct experts of a layer in {rows} rows", f"{size:.1f}")
    hits = Table(title="hit rate of a layer's table", title_justify="left")
    for column in ("slots C", *POLICIES):
        hits.add_column(column, justify="right")
    for capacity, rates in study.hit_rates.items():
        hits.add_row(capacity, *(f"{rates[p]:.3f}" for p in POLICIES))
    fetch = Table(title=f"prefetching into {study.prefetch_capacity} slots, LRU", title_justify="left")
    for column in ("predictor", "depth d", "recall r'", "precision q", "stall a row"):
        fetch.add_column(column, justify="left" if column == "predictor" else "right")
    for name, runs in study.prefetch.items():
        for depth, run in runs.items():
            fetch.add_row(name, depth, f"{run.recall:.2f}", f"{run.precision:.2f}", format_seconds(run.stall_s))
    return [routing, hits, fetch]
