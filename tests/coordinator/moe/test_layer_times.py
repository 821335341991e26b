"""Where a layer's time goes. Run: `.venv/bin/pytest tests/coordinator/moe/test_layer_times.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import pytest

from titan.common.slots import SlotTable
from titan.coordinator.moe.account import Executed
from titan.coordinator.moe.layer_times import EVERY, FIRST, MAX_ROWS, LayerTimes
from titan.coordinator.remote.exchange import Exchange


@dataclass
class Layer:
    table: SlotTable = field(default_factory=lambda: SlotTable(4))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def begun(times: LayerTimes, rows: int = 1) -> bool:
    times.begin(rows)
    return times.measuring


def test_one_pass_of_many_is_measured_and_no_prompt() -> None:
    times = LayerTimes(Executed(), Exchange())
    measured = [n for n in range(1, 2 * EVERY + 1) if begun(times)]
    assert measured == [FIRST, FIRST + EVERY]
    for _ in range(2 * EVERY):
        assert not begun(times, MAX_ROWS + 1)


def test_parts_add_up_to_the_clock() -> None:
    clock, executed, exchange = Clock(), Executed(), Exchange()
    times = LayerTimes(executed, exchange, clock)
    while not begun(times):
        pass
    layer = Layer()
    x, indices = mx.ones((1, 4)), mx.zeros((1, 2), mx.uint32)

    def at_home() -> mx.array:
        clock.now_s += 2.0
        layer.table.counts.stall_s += 0.5
        return x

    def remote() -> mx.array:
        clock.now_s += 4.0
        executed.wait_s += 3.0
        exchange.last_wire_s = 1.25
        return x

    clock.now_s += 10.0
    assert times.measure(3, cast("Any", layer), x, indices, at_home) is x
    clock.now_s += 7.0
    times.measure(4, cast("Any", layer), x, indices, remote)
    first, second = times.layers[3], times.layers[4]
    assert (first.attention, first.stall, first.local, first.wire, first.wait) == (10.0, 0.5, 1.5, 0.0, 0.0)
    assert (second.attention, second.stall, second.local, second.wire, second.wait) == (7.0, 0.0, 1.0, 1.25, 1.75)


def test_an_answer_that_lay_there_counts_as_waiting_once() -> None:
    clock, executed, exchange = Clock(), Executed(), Exchange()
    times = LayerTimes(executed, exchange, clock)
    times.begin(1)
    layer, x = Layer(), mx.ones((1, 4))

    def run() -> mx.array:
        clock.now_s += 1.0
        executed.wait_s += 0.25
        exchange.last_wire_s = 0.9  # sent long before this machine looked
        return x

    times.measure(0, cast("Any", layer), x, x, run)
    parts = times.layers[0]
    assert (parts.wire, parts.wait, parts.local) == (0.25, 0.0, pytest.approx(0.75))
