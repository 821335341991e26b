"""How much KV memory sequences fill, now and later: pure arithmetic over their lengths. Knows no model.

The caches of a batch are as long as its longest sequence, and they grow in steps. All that decode advance together, one
place a step, so a sequence that ends soon makes room before the others are long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["GROWTH_TOKENS", "Need", "peak_places"]

GROWTH_TOKENS = 256  # mlx-lm's caches grow by so many places at once


@dataclass(frozen=True, slots=True)
class Need:
    """One sequence's places.

    Args:
        length: filled now; of a sequence whose prompt is not done, with the whole prompt.
        final: filled at its end.
        decoding: it advances with the batch; otherwise it may join at any time from now on.
    """

    length: int
    final: int
    decoding: bool

    def within(self, steps: int) -> Need:
        """The same, looking no further than some steps of its own ahead."""
        return Need(self.length, min(self.final, self.length + steps), self.decoding)


def peak_places(needs: Iterable[Need]) -> int:
    """The most places that sequences fill together at any time until all have reached their `final`.

    Just before a decoding sequence ends, after s steps, those that still run fill rows × (longest + s). Sequences that
    end early only make it less.
    """
    joining, decoding = [], []
    for need in needs:
        (decoding if need.decoding else joining).append(need)
    rows = len(joining)
    longest_joining = max((need.final for need in joining), default=0)
    peak = rows * _allocated(longest_joining)
    longest = 0
    for need in sorted(decoding, key=lambda need: need.length - need.final):  # the one that runs longest first
        rows += 1
        longest = max(longest, need.length)
        peak = max(peak, rows * _allocated(max(longest_joining, longest + need.final - need.length)))
    return peak


def _allocated(length: int) -> int:
    """Places that a cache of this length may have taken."""
    return length + GROWTH_TOKENS - 1 if length else 0
