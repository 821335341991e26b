"""The values a plan is made of: a node with its figures, a prediction with its split, and the checks they share.

It knows neither plans nor how a figure was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan.common.errors import PlanViolation

MAX_NODES, MAX_LAYERS, MAX_EXPERTS, MAX_TOP_K = 1024, 1024, 4096, 64
MEND = "make the plan again with `titan plan`"


def need(condition: bool, what: str) -> None:
    """Raises PlanViolation with `what` unless `condition` holds."""
    if not condition:
        raise PlanViolation(f"the plan is not valid: {what}", MEND)


def check_whole(value: object, low: int, high: int, what: str) -> None:
    need(type(value) is int and low <= value <= high, f"{what} is {value!r}, not a whole number in {low}..{high}")


def check_figure(value: object, what: str) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    need(good, f"{what} is {value!r}, not a finite number of 0 or more")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine with its measured figures. Node 0 is the coordinator.

    Args:
        name: as in hosts.yaml.
        memory_bytes: bytes it may fill with experts (M_n).
        compute_s: seconds a (row, expert) pair (c_n).
        compute_fixed_s: seconds a call costs before its first pair, paid when the node executes anything.
        round_trip_s: latency of request and reply between node 0 and this node (rho_0n); 0 for node 0.
        bandwidth_bytes_s: bytes a second on the link (beta_0n); None when the link never limits.
        ssd_s: seconds to read one expert cold from its own SSD (lambda_ssd).
        page_cache_s: the same out of the page cache (lambda_pc); None when not measured.
        readers: parallel readers that still help (w).
        address: host:port the figures hold for; None for node 0 and for machines one does not have yet.
        address_why: in words, why that address and no other; None when there was no choice.
        power_w: package power under load (P_n); None where the system does not tell.
    """

    name: str
    memory_bytes: int
    compute_s: float
    compute_fixed_s: float = 0.0
    round_trip_s: float = 0.0
    bandwidth_bytes_s: float | None = None
    ssd_s: float = 0.0
    page_cache_s: float | None = None
    readers: int = 1
    address: str | None = None
    power_w: float | None = None
    address_why: str | None = None

    def check(self) -> None:
        """Raises PlanViolation: a figure is NaN, infinite, negative or of another type."""
        need(isinstance(self.name, str) and 0 < len(self.name) <= 255, f"a node's name is {self.name!r}")
        check_whole(self.memory_bytes, 0, 1 << 60, f"memory_bytes of node {self.name}")
        for key in ("compute_s", "compute_fixed_s", "round_trip_s", "ssd_s"):
            check_figure(getattr(self, key), f"{key} of node {self.name}")
        for key in ("page_cache_s", "bandwidth_bytes_s", "power_w"):
            if (value := getattr(self, key)) is not None:
                check_figure(value, f"{key} of node {self.name}")
        need(self.bandwidth_bytes_s is None or self.bandwidth_bytes_s > 0, f"bandwidth_bytes_s of {self.name} is 0")
        check_whole(self.readers, 1, 1024, f"readers of node {self.name}")
        for text in (self.address, self.address_why):
            need(text is None or (isinstance(text, str) and len(text) <= 4096), "a node's address")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected seconds of one decode step at batch 1, and how they split (equation 5).

    `round_trip_s` is what the round trips add to the step beyond computing; `tokens_per_s` holds
    (rows in the batch, tokens a second over all rows). `energy_j` is Phi of a step, None where a node's power is not
    known.
    """

    step_s: float
    attention_s: float
    sync_s: float
    compute_s: float
    round_trip_s: float
    stall_s: float
    tokens_per_s: tuple[tuple[int, float], ...] = ()
    energy_j: float | None = None

    def check(self) -> None:
        if self.energy_j is not None:
            check_figure(self.energy_j, "predicted energy_j")
        for key in ("step_s", "attention_s", "sync_s", "compute_s", "round_trip_s", "stall_s"):
            check_figure(getattr(self, key), f"predicted {key}")
        for rows, rate in self.tokens_per_s:
            check_whole(rows, 1, 1 << 20, "rows of a predicted rate")
            check_figure(rate, "a predicted rate")
