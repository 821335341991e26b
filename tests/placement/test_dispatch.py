"""Dispatch against brute force. Run: pytest tests/placement/test_dispatch.py"""

from __future__ import annotations

import itertools
import random

import pytest

from titan.placement.cost import Costs
from titan.placement.dispatch import choose
from titan.placement.dispatch_rows import choose_rows


def cost_of(nodes, reads, rows, costs: Costs, queue_s) -> float:
    load = [0.0] * len(costs.pair_s)
    for node, count in zip(nodes, rows, strict=True):
        load[node] += count
    span = max(costs.base_s[n] + queue_s[n] + costs.pair_s[n] * k for n, k in enumerate(load) if k)
    return span + -(-len(reads) // costs.readers) * costs.ssd_s


def brute_force(selected, holders, costs: Costs, queue_s, local, down, rows, evict_s: float = 0.0) -> float:
    ways = []
    for expert in selected:
        nodes = {n for n in holders[expert] if n not in down}
        if expert in local:
            nodes.add(0)
        ways.append([(n, 0) for n in sorted(nodes)] + ([] if 0 in nodes else [(0, 2 if nodes else 1)]))
    return min(
        cost_of([n for n, _ in way], [m for _, m in way if m], rows, costs, queue_s)
        + evict_s * sum(m == 2 for _, m in way)
        for way in itertools.product(*ways)
    )


def random_case(rng: random.Random, replicas: bool):
    nodes, experts = rng.randint(1, 5), 12
    top_k = rng.randint(1, 5 if replicas else 6)
    scale = rng.choice([0.0, 1.0, 10.0, 50.0])
    costs = Costs(
        pair_s=tuple(rng.choice([0.5, 1.0, 1.7, 3.0]) for _ in range(nodes)),
        base_s=tuple(rng.random() * scale for _ in range(nodes)),
        fixed_s=(0.0,) * nodes,
        ssd_s=rng.choice([0.0, 2.0, 8.0, 60.0]),
        readers=rng.randint(1, 3),
    )
    most = min(nodes, 3) if replicas else 1
    holders = [tuple(sorted(rng.sample(range(nodes), rng.randint(0, most)))) for _ in range(experts)]
    queue = [rng.choice([0.0, 0.0, 5.0]) for _ in range(nodes)]
    local = set(rng.sample(range(experts), rng.randint(0, 3)))
    down = set(rng.sample(range(1, nodes), rng.randint(0, min(2, nodes - 1)))) if rng.random() < 0.3 else set()
    return rng.sample(range(experts), top_k), holders, costs, queue, local, down


@pytest.mark.parametrize("replicas", [False, True])
def test_equals_brute_force_on_random_cases(replicas: bool) -> None:
    rng = random.Random(7)
    for case in range(5_000):
        selected, holders, costs, queue, local, down = random_case(rng, replicas)
        choice = choose(selected, holders, costs, queue_s=queue, local_resident=local, down=down)
        rows = [1] * len(selected)
        best = brute_force(selected, holders, costs, queue, local, down, rows)
        assert choice.latency_s == pytest.approx(best), case
        check_valid(choice, selected, holders, local, down)
        assert cost_of(choice.nodes, choice.reads, rows, costs, queue) == pytest.approx(best), case


@pytest.mark.parametrize("replicas", [False, True])
def test_charging_for_evictions_is_exact_too(replicas: bool) -> None:
    rng = random.Random(17)
    for case in range(1_000):
        selected, holders, costs, queue, local, down = random_case(rng, replicas)
        evict_s = rng.choice([0.5, 3.0, 40.0])
        kwargs = {"queue_s": queue, "local_resident": local, "down": down, "evict_s": evict_s}
        choice = choose(selected, holders, costs, **kwargs)
        held = [any(n not in down for n in holders[e]) or e in local for e in selected]
        charged = evict_s * sum(e in choice.reads and h for e, h in zip(selected, held, strict=True))
        best = brute_force(selected, holders, costs, queue, local, down, [1] * len(selected), evict_s)
        assert choice.latency_s + charged == pytest.approx(best), case
        got = cost_of(choice.nodes, choice.reads, [1] * len(selected), costs, queue)
        assert got == pytest.approx(choice.latency_s), case


def check_valid(choice, selected, holders, local, down) -> None:
    assert len(choice.nodes) == len(selected)
    for expert, node in zip(selected, choice.nodes, strict=True):
        assert node not in down
        if expert in choice.reads:
            assert node == 0
        else:
            assert node in holders[expert] or (node == 0 and expert in local)


def test_batched_rows_are_valid_and_near_brute_force() -> None:
    rng, ratios = random.Random(11), []
    for _ in range(1_500):
        selected, holders, costs, queue, local, down = random_case(rng, True)
        rows = [rng.randint(1, 6) for _ in selected]
        choice = choose_rows(selected, rows, holders, costs, queue_s=queue, local_resident=local, down=down)
        check_valid(choice, selected, holders, local, down)
        assert cost_of(choice.nodes, choice.reads, rows, costs, queue) == pytest.approx(choice.latency_s)
        ratios.append(choice.latency_s / brute_force(selected, holders, costs, queue, local, down, rows))
    assert min(ratios) > 1 - 1e-9
    assert sum(r > 1 + 1e-9 for r in ratios) < len(ratios) * 0.1
    assert max(ratios) < 1.5


def test_batched_rows_without_replicas_are_exact() -> None:
    rng = random.Random(13)
    for _ in range(1_000):
        selected, holders, costs, queue, _, down = random_case(rng, False)
        choice = choose_rows(selected, [1] * len(selected), holders, costs, queue_s=queue, down=down)
        assert choice.latency_s == pytest.approx(choose(selected, holders, costs, queue_s=queue, down=down).latency_s)


def test_sixteen_nodes_and_experts_finish() -> None:
    rng = random.Random(3)
    costs = Costs((1.0,) * 16, tuple(rng.random() for _ in range(16)), (0.0,) * 16, 5.0, 4)
    holders = [tuple(sorted(rng.sample(range(16), 4))) for _ in range(64)]
    choice = choose(rng.sample(range(64), 16), holders, costs)
    assert choice.latency_s < 3


def test_a_busy_worker_is_relieved_by_a_replica() -> None:
    costs = Costs((1.0, 1.0, 1.0), (0.0, 2.0, 2.0), (0.0,) * 3, 50.0, 1)
    holders = [(1, 2), (1, 2)]
    assert choose([0, 1], holders, costs, queue_s=[0, 20, 0]).nodes == [2, 2]
    assert sorted(choose([0, 1], holders, costs).nodes) == [1, 2]


def test_every_worker_down_reads_everything() -> None:
    costs = Costs((1.0, 1.0), (0.0, 2.0), (0.0, 0.0), 3.0, 2)
    choice = choose([0, 1, 2], [(1,), (1,), (0,)], costs, down={1})
    assert choice.nodes == [0, 0, 0]
    assert sorted(choice.reads) == [0, 1]
    assert choice.latency_s == 6.0
