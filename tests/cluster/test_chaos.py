"""Things go wrong in a random order that a seed repeats; the tokens stay mlx-lm's and nothing is left over.

Run: .venv/bin/pytest tests/cluster/test_chaos.py
More steps: .venv/bin/python tests/fixtures/chaos.py --seed 1 --steps 1000
"""

from __future__ import annotations

import sys

import pytest
from fixtures.chaos import Chaos

STEPS = 40


@pytest.mark.skipif(sys.platform != "linux", reason="needs the loopback addresses 127.0.0.2 to 127.0.0.4")
@pytest.mark.parametrize("seed", [1])
def test_nothing_breaks_whatever_breaks(seed: int) -> None:
    with Chaos(seed) as chaos:
        chaos.run(STEPS)
        assert len(chaos.done) > 8, chaos.done
        dispatcher = chaos.cluster.dispatcher
        assert dispatcher is not None
        assert sum(dispatcher.executed.remote.values()) > 0
        assert dispatcher.executed.fallbacks > 0
