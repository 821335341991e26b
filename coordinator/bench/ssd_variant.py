"""One way to run the SSD tier, and what was found about it. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from titan.common.store import CacheMode

__all__ = ["LayerFigures", "Variant", "VariantFigures"]


@dataclass(frozen=True, slots=True)
class Variant:
    """C slots a layer, policy, prefetch, cache mode; `packed` reads from the pack.

    Args:
        forced: experts to read ahead a layer; None leaves it to condition (9).
        read_delay_s: what every expert's read waits besides.
    """

    slots: int
    policy: str = "lru"
    prefetch: str = "off"
    forced: int | None = None
    cache: CacheMode = CacheMode.DIRECT
    packed: bool = True
    overlap: bool = False
    read_delay_s: float = 0.0

    @property
    def name(self) -> str:
        """What differs from packed, direct reads without prefetch."""
        parts = [self.policy.upper() if self.policy != "forecast" else self.policy]
        if self.prefetch != "off":
            parts.append(self.prefetch + ("" if self.forced is None else f" m={self.forced}"))
        if self.overlap:
            parts.append("overlap")
        if not self.packed:
            parts.append("as mlx saves")
        if self.cache is not CacheMode.DIRECT:
            parts.append(str(self.cache))
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer, a token: hit rate, loads, late prefetches, stall."""

    layer: int
    hit_rate: float
    loads: float
    late: float
    stall_ms: float


@dataclass(frozen=True, slots=True)
class VariantFigures:
    """Means a token over the counted tokens; ratios are medians over blocks of neighbouring tokens.

    Args:
        unavoidable_ms: the stall that the simulator says this policy cannot avoid without prefetch.
        over_expected: token ÷ (resident + unavoidable); `over_expected_error` is the standard error of that median.
        over_first: token ÷ the same token with the first variant of the group, and likewise its error.
        fetch_ms: lambda, one expert alone.
        reuse: share of a token's experts that the token before it chose too.
    """

    variant: Variant
    name: str
    tokens: int
    reuse: float
    token_ms: float
    resident_ms: float
    unavoidable_ms: float
    over_expected: float
    over_expected_error: float
    over_first: float
    over_first_error: float
    hit_rate: float
    simulated_hit_rate: float
    belady_hit_rate: float
    loads: float
    mbytes: float
    prefetched: float
    useful: float
    late: float
    stall_ms: float
    fetch_ms: float
    identical: bool
    layers: list[LayerFigures] = field(default_factory=list)
